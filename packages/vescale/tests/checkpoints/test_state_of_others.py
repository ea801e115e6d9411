"""What others write of a sharded model and its optimizer, under every kind of plan: whole tensors to the bit, or an
error of veScale's that names the line that does it. A file that lacks something, or holds a part under the shape of
the whole, is neither."""

import copy
import dataclasses
import functools
import io
import os

import pytest
import torch
import torch.distributed as dist

import vescale
from vescale.pretrained import places_of
from vescale_plans import library
from vescale_testkit import run_ranks, warm_up

warm_up("vescale", "transformers.models.llama.modeling_llama", "safetensors.torch", "torch.distributed.checkpoint")

CONFIG = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def _data(**options):
    return vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, data_axis="dp", **options)


PLANS = {
    "tp": lambda: library.llama({"tp": 2}, sequence_parallel=False),
    "dp tp zero 3": lambda: dataclasses.replace(library.llama({"dp": 2, "tp": 2}, sequence_parallel=False), zero=3),
    "zero 2": lambda: _data(zero=2),
    "zero 3": lambda: _data(zero=3),
    "ep": lambda: _data(expert_axis="dp"),
    "pp": lambda: vescale.Plan(
        mesh={"pp": 2},
        parameters={"*": {}},
        pipeline=vescale.Pipeline(axis="pp", cuts=("model.layers.1",), schedule="1f1b", microbatches=2),
    ),
}


def _model(plan):
    import transformers

    torch.manual_seed(0)
    if plan == "ep":
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**CONFIG, num_local_experts=4, num_experts_per_tok=2)
        )
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, tie_word_embeddings=False))


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def _trained(model, optimizer):
    tokens = torch.randint(61, (4, 8), generator=torch.Generator().manual_seed(1))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return model, optimizer


def _whole(state):
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def _file(folder, name):
    """Of this rank alone."""
    return f"{folder}/{dist.get_rank()}.{name}"


# --- what is written, and read again: names and tensors --------------------------------------------


def _save_file(model, folder):
    import safetensors.torch as safetensors

    safetensors.save_file(dict(model.state_dict()), _file(folder, "file"))
    return safetensors.load_file(_file(folder, "file"))


def _save_model(model, folder):
    import safetensors.torch as safetensors

    safetensors.save_model(model, _file(folder, "model"))
    return safetensors.load_file(_file(folder, "model"))


def _save_pretrained(model, folder):
    """The first rank alone writes, and hears of it."""
    import safetensors.torch as safetensors

    model.save_pretrained(f"{folder}/pretrained")
    return safetensors.load_file(f"{folder}/pretrained/model.safetensors") if not dist.get_rank() else None


def _dcp(model, folder):
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(model.state_dict()), checkpoint_id=f"{folder}/dcp")
    names = dcp.FileSystemReader(f"{folder}/dcp").read_metadata().state_dict_metadata
    found = {name: torch.zeros(one.size, dtype=one.properties.dtype) for name, one in names.items()}
    dcp.load(found, checkpoint_id=f"{folder}/dcp")
    return found


def _torch_save(model, folder):
    torch.save(model.state_dict(), _file(folder, "pt"))
    return torch.load(_file(folder, "pt"))


def _pickled_model(model, folder):
    torch.save(model, _file(folder, "whole.pt"))
    return torch.load(_file(folder, "whole.pt"), weights_only=False).state_dict()


def _deepcopy(model, folder):
    return _whole(copy.deepcopy(model).state_dict())


def _averaged(model, folder):
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    return _whole(averaged.module.state_dict())


def _export(model, folder):
    import safetensors.torch as safetensors

    vescale.export_huggingface(f"{folder}/export", model)
    dist.barrier()
    files = [f"{folder}/export/{name}" for name in os.listdir(f"{folder}/export") if name.endswith(".safetensors")]
    found = {name: tensor for file in files for name, tensor in safetensors.load_file(file).items()}
    for name, places in places_of(model).items():  # experts are published one by one
        parts = [(begin, found.pop(published)) for published, begin, _ in places]
        found[name] = torch.empty(model.state_dict()[name].shape)
        for begin, part in parts:
            whole = (*(1,) * (len(begin) - part.ndim), *part.shape)
            found[name][tuple(slice(at, at + size) for at, size in zip(begin, whole))] = part.reshape(whole)
    return found


class _Holds:
    """What has a state."""

    def __init__(self, state):
        self._state = state

    def state_dict(self):
        return self._state


def _whole_state_dict(model, folder):
    """The first rank alone gets it."""
    found = vescale.whole_state_dict(model)
    assert bool(found) == (not dist.get_rank())
    if found:
        import safetensors.torch as safetensors

        shared = [name for name, value in found.items() if value.untyped_storage().nbytes() != value.nbytes]
        assert not shared, shared  # whose file would have the whole buffer, or none of them
        safetensors.save_model(_Holds(found), _file(folder, "held"))  # as accelerate's `save_model` does
        read = safetensors.load_file(_file(folder, "held"))
        assert all(torch.equal(read[name], value) for name, value in found.items())
        torch.save(found, _file(folder, "state.pt"))
    return torch.load(_file(folder, "state.pt")) if found else None


def _state(model, folder):
    return _whole(model.state_dict())


WAYS = {
    "state_dict": _state,
    "safetensors.save_file": _save_file,
    "safetensors.save_model": _save_model,
    "save_pretrained": _save_pretrained,
    "torch.save": _torch_save,
    "torch.save of the model": _pickled_model,
    "DCP": _dcp,
    "deepcopy": _deepcopy,
    "AveragedModel": _averaged,
    "export_huggingface": _export,
    "whole_state_dict": _whole_state_dict,
}


def _told(way, wanted):
    """The verdict on one way, as text: what is equal, or which error of whom."""
    try:
        found = way()
    except vescale.VescaleError as error:
        assert error.remedies, error
        return f"refused: {error}"
    except Exception as error:
        return f"foreign: {type(error).__name__}: {error}"
    if found is None:
        return "nothing"
    if lacking := sorted(wanted.keys() - found.keys()):
        return f"lacks {len(lacking)} of {len(wanted)}: {lacking[0]}"
    wrong = [
        name
        for name, one in wanted.items()
        if type(found[name]) is not torch.Tensor or not torch.equal(found[name], one)  # of another shape neither
    ]
    return f"wrong: {wrong}" if wrong else "whole"


def _of_model(plan, folder):
    single = _model(plan)
    wanted = {name: tensor.detach().clone() for name, tensor in single.state_dict().items()}
    model, _ = vescale.parallelize(PLANS[plan](), single, _adamw)
    mine = {name: wanted[name] for name in model.state_dict()}
    in_memory = (_state, _deepcopy, _averaged)  # of a pipeline a rank has its stage's
    return {
        name: _told(functools.partial(way, model, folder), mine if way in in_memory else wanted)
        for name, way in WAYS.items()
    }, list(mine)


ALONE = {"torch.save", "torch.save of the model"}
"""What one rank does alone cannot gather: an error under every plan."""
REFUSED = {
    "tp": ALONE | {"safetensors.save_file", "safetensors.save_model", "save_pretrained"},
    "dp tp zero 3": ALONE | {"safetensors.save_file", "safetensors.save_model", "save_pretrained"},
    "zero 2": ALONE,
    "zero 3": ALONE | {"safetensors.save_file", "safetensors.save_model", "save_pretrained"},
    "ep": ALONE | {"safetensors.save_file", "save_pretrained"},
    "pp": ALONE | {"safetensors.save_file", "safetensors.save_model", "save_pretrained", "deepcopy", "AveragedModel"},
}
NOT_OURS = {"zero 2": {"safetensors.save_model"}, "ep": {"safetensors.save_model"}}
"""safetensors refuses parameters that lie in one buffer by itself, and says so."""


@pytest.mark.parametrize("plan", PLANS)
def test_a_models_state(plan, tmp_path):
    answers = run_ranks(PLANS[plan]().world_size, _of_model, plan, str(tmp_path), timeout=120)
    assert {name for _, held in answers for name in held} == set(_model(plan).state_dict())
    for rank, (found, _) in enumerate(answers):
        kinds = {name: told.partition(":")[0] for name, told in found.items()}
        for name in ("save_pretrained", "whole_state_dict"):
            if rank and kinds[name] == "nothing":
                kinds[name] = answers[0][0][name].partition(":")[0]
        wrong = {name for name, kind in kinds.items() if kind not in ("whole", "refused")}
        assert wrong == NOT_OURS.get(plan, set()), found
        assert {name for name, kind in kinds.items() if kind == "refused"} == REFUSED[plan], found


# --- what is read again under the plan, and the optimizer -------------------------------------------


def _one_device(plan, steps=1):
    """Parameters and states by parameter, as one device has them after a step."""
    model = _model(plan)
    optimizer = _adamw(model.parameters())
    for _ in range(steps):
        _trained(model, optimizer)
        optimizer.zero_grad()
    return model, optimizer


def _reads_dcp(plan, folder):
    import torch.distributed.checkpoint as dcp

    single, _ = _one_device(plan)
    if dist.get_rank() == 0:
        dcp.save(dict(single.state_dict()), checkpoint_id=f"{folder}/one", no_dist=True)
    dist.barrier()
    model, _ = vescale.parallelize(PLANS[plan](), _model(plan), _adamw)
    dcp.load(dict(model.state_dict()), checkpoint_id=f"{folder}/one")
    wanted = single.state_dict()
    return [name for name, value in _whole(model.state_dict()).items() if not torch.equal(value, wanted[name])]


@pytest.mark.parametrize("plan", PLANS)
def test_dcp_of_one_device_is_read_into_shards(plan, tmp_path):
    assert not any(run_ranks(PLANS[plan]().world_size, _reads_dcp, plan, str(tmp_path), timeout=120))


def _of_optimizer(plan):
    """`torch.save` of what an optimizer's state_dict holds is refused; made whole it is one device's, and what one
    device wrote is loaded: from there on both train alike."""
    single, reference = _one_device(plan)
    model, optimizer = vescale.parallelize(PLANS[plan](), _model(plan), _adamw)
    _trained(model, optimizer)
    optimizer.zero_grad()
    state = optimizer.state_dict()
    with pytest.raises(vescale.OperatorError, match="full_tensor"):
        torch.save(state, io.BytesIO())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    wanted = dict(zip((name for name, _ in single.named_parameters()), reference.state_dict()["state"].values()))
    for at, values in state["state"].items():
        whole = _whole(values)
        for key, value in wanted[held[at]].items():
            torch.testing.assert_close(whole[key], value, rtol=1e-4, atol=1e-7)
    file = io.BytesIO()
    one_devices = {
        "state": {at: wanted[name] for at, name in enumerate(held)},
        "param_groups": [{**reference.state_dict()["param_groups"][0], "params": list(range(len(held)))}],
    }
    torch.save(one_devices, file)
    file.seek(0)
    fresh_model, fresh = vescale.parallelize(PLANS[plan](), single, _adamw)
    fresh.load_state_dict(torch.load(file))
    for at, values in fresh.state_dict()["state"].items():
        for key, value in _whole(values).items():
            assert torch.equal(value, wanted[held[at]][key]), (held[at], key)
    fresh.load_state_dict(copy.deepcopy(fresh.state_dict()))
    for one, its in ((fresh_model, fresh), (model, optimizer)):
        _trained(one, its)
    return max(
        ((a - b).norm() / b.norm()).item()
        for a, b in zip(_whole(fresh_model.state_dict()).values(), _whole(model.state_dict()).values(), strict=True)
    )


@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizers_state(plan):
    assert all(apart <= 1e-4 for apart in run_ranks(PLANS[plan]().world_size, _of_optimizer, plan, timeout=120))
