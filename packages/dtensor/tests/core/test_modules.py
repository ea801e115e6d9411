"""torch's own module tests as an oracle: every entry of its module database, forward and backward.

Inputs lie Shard(0) and parameters are sharded on dim 0; buffers are replicated. Some
entries, of those some samples; all of both with VESCALE_GRID=full.
"""

import copy
import json
import os
import warnings

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from vescale_dtensor import Replicate, Shard, distribute_tensor
from vescale_dtensor._errors import VescaleError
from vescale_dtensor._tensor.tensor import DTensor
from vescale_testkit import RankError, in_turns, mesh_of, run_ranks, slice_of

SLICES, SAMPLES = 8, 8


def database():
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db if torch.float32 in info.dtypes}


def entries() -> list[tuple[str, bool]]:
    """(name, training)"""
    both = [(name, mode) for name, info in database().items() for mode in (True, False)]
    return [(name, mode) for name, mode in both if mode or database()[name].train_and_eval_differ]


def spread(value):
    """Shard(0); what has no dim 0 is replicated."""
    if not isinstance(value, torch.Tensor):
        return value
    placement = Shard(0) if value.ndim else Replicate()
    return distribute_tensor(value.detach().clone(), mesh_of(2), [placement]).requires_grad_(value.requires_grad)


def sharded(module: nn.Module) -> nn.Module:
    """The module, with DTensors in it."""
    moved = {}  # shared stays shared
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                if parameter not in moved:
                    moved[parameter] = nn.Parameter(spread(parameter.detach()), parameter.requires_grad)
                owner._parameters[name] = moved[parameter]
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = distribute_tensor(buffer, mesh_of(2), [Replicate()])
    for owner in module.modules():
        if isinstance(owner, nn.RNNBase):
            owner._flat_weights = [getattr(owner, name, None) for name in owner._flat_weights_names]
    return module


def whole(value) -> torch.Tensor:
    return value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()


def differences(what: str, wanted: list, found: list) -> list[str]:
    if len(wanted) != len(found):
        return [f"{what}: {len(found)} for {len(wanted)}"]
    out = []
    for i, (want, have) in enumerate(zip(wanted, found)):
        if isinstance(want, torch.Tensor) and isinstance(have, torch.Tensor):
            try:
                torch.testing.assert_close(whole(have), want.detach(), rtol=1e-4, atol=1e-4, equal_nan=True)
            except AssertionError as error:
                out.append(f"{what} {i}: {error}")
        elif want is not have and want != have:
            out.append(f"{what} {i}: {have!r} for {want!r}")
    return out


def run(module: nn.Module, args: tuple, kwargs: dict) -> tuple[list, list, list]:
    """(outputs, gradients of the inputs, gradients of the parameters and buffers after)"""
    torch.manual_seed(3)
    outputs = tree_flatten(module(*args, **kwargs))[0]
    differentiable = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    generator = torch.Generator().manual_seed(5)
    seeds = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in differentiable]
    if differentiable:
        torch.autograd.backward(differentiable, seeds)
    leaves = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    state = [p.grad for p in module.parameters()] + list(module.buffers())
    return outputs, [t.grad for t in leaves], state


def check_sample(info, sample, training: bool) -> list[str] | None:
    """The differences; None when one device does not run it."""

    def fresh(value):
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value

    given, asked = sample.constructor_input, sample.forward_input
    try:
        torch.manual_seed(1)
        module = info.module_cls(*given.args, **given.kwargs).to(torch.float32).train(training)
        if info.is_lazy:
            module(*tree_map(fresh, asked.args), **tree_map(fresh, asked.kwargs))
        before = copy.deepcopy(module)
        wanted = run(module, tree_map(fresh, asked.args), tree_map(fresh, asked.kwargs))
    except (RuntimeError, ValueError):
        return None
    found = run(sharded(before), tree_map(spread, asked.args), tree_map(spread, asked.kwargs))
    return [
        line
        for what, want, have in zip(("output", "gradient of input", "state"), wanted, found)
        for line in differences(what, want, have)
    ]


def outcomes(name: str, training: bool, most: int) -> dict[str, list[str]]:
    """Texts by what came out ("pass", "wrong", "raise" a typed error, "crash" any other), on this rank."""
    warnings.simplefilter("ignore")
    info = database()[name]
    torch.manual_seed(0)
    samples = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
    found = {"pass": [], "wrong": [], "raise": [], "crash": []}
    step = max(1, len(samples) // most)
    for number, sample in enumerate(samples[::step]):
        text = f"{name} {'train' if training else 'eval'} sample {number * step} {sample.desc}"
        try:
            wrong = check_sample(info, sample, training)
            if wrong is not None:
                found["wrong" if wrong else "pass"].append("\n".join([text, *wrong]))
        except VescaleError as error:
            found["raise"].append(f"{text}\n{type(error).__name__}: {error}")
        except Exception as error:
            found["crash"].append(f"{text}\n{type(error).__name__}: {error}")
    return found


def worst(name: str, training: bool, most: int) -> tuple[str, list[str]]:
    """The worst outcome over all samples and ranks, and its texts; "none" if one device runs no sample."""
    try:
        ranks = run_ranks(2, outcomes, name, training, most, timeout=300.0)
    except RankError as error:
        return "crash", [f"{name}: {error}"]
    for kind in ("crash", "wrong", "raise", "pass"):
        if any(found[kind] for found in ranks):
            return kind, next(found[kind] for found in ranks if found[kind])
    return "none", [f"{name}: one device runs no sample"]


@in_turns(3)
def test_every_module_equals_one_device(capsys):
    full = os.environ.get("VESCALE_GRID") == "full"
    asked = slice_of(entries(), SLICES)
    samples = 0
    by_kind = {"pass": [], "wrong": [], "raise": [], "crash": [], "none": []}
    for name, training in asked:
        kind, texts = worst(name, training, 10**6 if full else SAMPLES)
        samples += len(texts)
        by_kind[kind].append(((name, training), texts))
    counts = {kind: len(found) for kind, found in by_kind.items()}
    raising = [f"{name}{'' if mode else ' (eval)'}" for (name, mode), _ in by_kind["raise"]]
    with capsys.disabled():
        print(json.dumps({"entries": len(asked), "samples": samples, **counts, "raising": raising}))
    bad = [text for kind in ("crash", "wrong") for _, texts in by_kind[kind] for text in texts[:2]]
    if bad:
        pytest.fail("\n\n".join(bad))
    assert counts["pass"] >= (0.95 if full else 0.8) * (len(asked) - counts["none"])


# --- what the module tests found -----------------------------------------------------------


def test_an_empty_batch_leaves_running_statistics():
    """They became NaN."""

    def work():
        module = sharded(nn.BatchNorm1d(5))
        module(spread(torch.zeros(0, 5)))
        assert module.running_mean.full_tensor().tolist() == [0.0] * 5
        assert module.running_var.full_tensor().tolist() == [1.0] * 5

    run_ranks(2, work)
