"""What TorchTitan 0.3.0 lacks to run on a CPU with the release of torch 2.13. Imported before it; changes names only.

1. It takes CUDA for granted where there is no accelerator: the CPU's device module answers instead.
2. gloo has no PREMUL_SUM, which FSDP2 takes for a gradient divided by 1: a plain sum instead.
3. `PipelineSchedule.step(arg_mbs=...)` is newer than torch 2.13: the microbatches go to the method below it.
4. FSDP2 of torch 2.13 refuses parameters that are plain tensors with declared types (`spmd_types`). The declared layout
   becomes a DTensor's for storage, the forward gets the plain tensor, and the gradient of a parameter that is
   replicated over the tensor axis is summed over it, as the declared types say.
5. FlexAttention has no backward on a CPU: the same causal attention through `scaled_dot_product_attention`, which
   TorchTitan has as a module of its own.
"""

from __future__ import annotations

import types

import torch
import torch._utils
import torch.distributed as dist


def device_module() -> types.ModuleType:
    module = types.ModuleType("cpu_as_device")
    for name in ("is_available", "synchronize", "current_device", "current_stream", "stream", "set_device",
                 "device_count", "Stream", "Event"):  # fmt: skip
        setattr(module, name, getattr(torch.cpu, name))
    module.get_device_name = lambda *_: "cpu"
    module.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34, name="cpu")
    module.memory_stats = lambda *_: {}
    module.reset_peak_memory_stats = module.empty_cache = lambda *_: None
    return module


def prepare() -> None:
    """Before TorchTitan is imported."""
    module = device_module()
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda *_: module


def mend() -> None:
    """After it was."""
    _sum_plainly()
    _step_by_microbatches()
    _shard_declared_parameters()


def attend_plainly(config: object) -> None:
    """Every layer of a model's configuration attends through `scaled_dot_product_attention`."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()


def _sum_plainly() -> None:
    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self, factor):
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor


def _step_by_microbatches() -> None:
    from torch.distributed.pipelining import schedules

    def step(self, *, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, return_outputs=True, loss_kwargs):
        self._stage.has_backward = self._has_backward
        self._stage.clear_runtime_states()
        count = self._n_microbatches
        self._step_microbatches(arg_mbs or [()] * count, kwarg_mbs or [{}] * count, target_mbs, losses,
                                return_outputs, loss_kwargs=loss_kwargs)  # fmt: skip

    schedules.PipelineScheduleSingle.step = step


def _shard_declared_parameters() -> None:
    import spmd_types
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torchtitan.protocols.module import Module

    declare, shard, gradient = (
        Module._spmd_distribute_state, FSDPParam._init_sharding_spec, FSDPParam._get_grad_inner_tensor
    )  # fmt: skip

    def distribute_state(self, parallel_dims, name, tensor, layout, *, is_param):
        declare(self, parallel_dims, name, tensor, layout, is_param=is_param)
        if is_param:
            types_ = {str(axis.value): kind for axis, kind in layout.per_axis_spmd_types().items()}
            self._parameters[name].declared_over_tp = types_.get("tp")

    def init_sharding_spec(self, param, fsdp_placement, shard_dim):
        self.sum_over = None
        if not self.mesh_info.is_spmd_mesh or isinstance(param, DTensor):
            return shard(self, param, fsdp_placement, shard_dim)
        mesh, declared = self.mesh_info.spmd_mesh, param.declared_over_tp
        place = {"tp": Shard(declared.dim) if isinstance(declared, spmd_types.Shard) else Replicate()}
        placements = [place.get(axis, Replicate()) for axis in mesh.mesh_dim_names]
        stored = DTensor.from_local(param.data, mesh, placements, run_check=False)
        data = self._init_sharding_spec_spmd(stored, fsdp_placement, shard_dim)
        self._unsharded_dtensor_spec = None  # the forward gets the plain tensor
        if declared is spmd_types.R and "tp" in mesh.mesh_dim_names:
            self.sum_over = mesh.get_group("tp")
        return data

    def grad_inner_tensor(self, grad):
        found = gradient(self, grad)
        if getattr(self, "sum_over", None) is not None:
            found = found.contiguous()
            dist.all_reduce(found, group=self.sum_over)
        return found

    Module._spmd_distribute_state = distribute_state
    FSDPParam._init_sharding_spec = init_sharding_spec
    FSDPParam._get_grad_inner_tensor = grad_inner_tensor
