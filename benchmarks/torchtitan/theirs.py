"""TorchTitan's side: its own Trainer builds model, loss and optimizer, and runs forward and backward.

    python theirs.py spmd_types|partial_dtensor LAYOUT      # with the Python of TorchTitan's environment

`spmd_types/bare`, without data parallelism, leaves out FSDP2, which its Trainer installs even over one rank.

The step is `Trainer.train_step` less what ours does not do either: logging, the learning rate's schedule, the loader.
No compile, no activation checkpointing, no CUDA graphs (none on a CPU), loss in one piece.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import on_cpu
import torch
from contender import join, serve
from setting import CLIP, LEARNING_RATE, MICROBATCHES, SEED, Layout, samples

on_cpu.prepare()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models.llama3 import config_registry, parallelize  # noqa: E402

on_cpu.mend()


class NoLoader(BaseDataLoader):
    """The steps get their samples from `setting`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, **kwargs) -> None:
        pass

    def __iter__(self):
        return iter(())

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **kwargs) -> None:
        super().__init__()

    def encode(self, *args, **kwargs):
        return []

    def decode(self, *args, **kwargs):
        return ""

    def get_vocab_size(self):
        return 0


def configured(backend: str, layout: Layout):
    config = config_registry.llama3_debugmodel()
    on_cpu.attend_plainly(config.model_spec.model)
    config.loss = config.loss.loss_fn
    config.dataloader, config.tokenizer = NoLoader.Config(), NoTokenizer.Config()
    config.activation_checkpoint, config.validator.enable, config.checkpoint.enable = None, False, False
    config.dump_folder = tempfile.mkdtemp(prefix="torchtitan-")
    config.debug.seed, config.debug.enable_structured_logging = SEED, False
    config.training.seq_len, config.training.local_batch_size = layout.sequence, layout.batch // layout.dp
    config.training.mixed_precision_param, config.training.disable_cuda_graphs = "float32", True
    config.optimizer.implementation = "fused"
    parallelism = config.parallelism
    parallelism.spmd_backend = backend
    parallelism.data_parallel_shard_degree = layout.dp
    parallelism.tensor_parallel_degree = layout.tp
    parallelism.pipeline_parallel_degree = layout.pp
    parallelism.pipeline_parallel_schedule = "1F1B"
    parallelism.pipeline_parallel_microbatch_size = layout.batch // MICROBATCHES or 1
    return config


def make(backend: str, layout: Layout) -> tuple[dict[str, Any], Any]:
    rank = join(layout)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.autograd.set_multithreading_enabled(False)  # as its own init_distributed does
    if layout.ranks == 1:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    backend, _, bare = backend.partition("/")
    config = configured(backend, layout)
    if bare:
        parallelize.apply_fsdp_to_decoder = lambda *arguments, **options: None
        for layer in config.model_spec.model.layers:  # theirs draws the whole matrix, which then has no place
            layer.attention.qkv_linear.wqkv.param_init = {"weight": torch.nn.init.normal_}
    trainer = config.build()
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
    dims = trainer.parallel_dims
    pipeline, share = dims.get_optional_mesh("pp"), layout.batch // layout.dp
    data_rank = rank // layout.tp if layout.dp > 1 else 0
    positions = torch.arange(layout.sequence)
    total = torch.tensor(layout.batch * layout.sequence, dtype=torch.int64)

    def fed(first: int, count: int):
        inputs, targets = samples(first, count, layout.sequence)
        return {"input": inputs, "positions": positions.expand(count, -1).contiguous()}, targets

    def step(number: int) -> torch.Tensor:
        first = number * layout.batch + data_rank * share
        if pipeline is None:
            inputs, targets = fed(first, share)
        else:
            one = share // MICROBATCHES
            inputs, targets = map(list, zip(*(fed(first + i * one, one) for i in range(MICROBATCHES))))
        loss = trainer.forward_backward_step(input_dict=inputs, labels=targets, global_valid_tokens=total)
        if not layout.fake:
            parameters = [each for part in trainer.model_parts for each in part.parameters()]
            distributed.clip_grad_norm_(parameters, CLIP, foreach=True, pp_mesh=pipeline)
        trainer.optimizers.step()
        trainer.optimizers.zero_grad(set_to_none=True)
        if layout.fake or dims.get_optional_mesh("loss") is None:
            return loss.detach()
        return torch.tensor(distributed.dist_sum(loss.detach(), dims.get_optional_mesh("loss")))

    return {"name": f"TorchTitan, {backend}", "torchtitan": metadata.version("torchtitan")}, step


if __name__ == "__main__":
    serve(make)
