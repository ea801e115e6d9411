"""What shares a parameter's or gradient's memory on one device is written: the write is there, or an error says that it
is not. Hooks on several parameters fire as on one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from vescale_dtensor import OperatorError, Shard, ViewError
from vescale_plans import Plan, parallelize
from vescale_testkit import run_ranks, warm_up

numpy = pytest.importorskip("numpy")
warm_up("vescale_plans")

TP = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "*": {}}
PLANS = {
    **{f"zero {zero}": {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": zero} for zero in (0, 2, 3)},
    "tp": {"mesh": {"tp": 2}, "parameters": TP},
    "tp, zero 3": {"mesh": {"dp": 2, "tp": 2}, "parameters": TP, "zero": 3},
}
WHOLE = ("zero 0",)
SHARED = {
    "numpy": lambda w: w.numpy(),
    "asarray": lambda w: numpy.asarray(w),
    "cpu, numpy": lambda w: w.detach().cpu().numpy(),
    "numpy of a view": lambda w: w[:].numpy(),
    "from_dlpack": lambda w: torch.from_dlpack(w),
    "numpy.from_dlpack": lambda w: numpy.from_dlpack(w),
    "to_dlpack": lambda w: torch.from_dlpack(torch.utils.dlpack.to_dlpack(w)),
    "einsum": lambda w: torch.einsum("ij->ji", w),
    "dropout": lambda w: F.dropout(w, training=False),
    "dropout of nothing": lambda w: nn.Dropout(0.0)(w),
    "alpha_dropout": lambda w: F.alpha_dropout(w, training=False),
    "feature_alpha_dropout": lambda w: F.feature_alpha_dropout(w, training=False),
    "sum_to_size": lambda w: w.sum_to_size(7, 6),
    "contiguous": lambda w: w.contiguous(),
    "expand": lambda w: w.expand(7, 6),
    "ravel": lambda w: w.ravel(),
    "atleast_2d": lambda w: torch.atleast_2d(w),
    "type": lambda w: w.type(torch.float32),
}
OF_PARAMETERS = ("cpu, numpy", "numpy of a view")
REFUSALS = (ViewError, OperatorError, ValueError)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))


def made(plan):
    return net() if plan is None else parallelize(Plan(**plan), net(), None)[0]


def values(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def written(plan):
    """Parameter and gradient after a write through each way; the error where there is one."""
    found = {}
    for name, share in SHARED.items():
        for of in ("data", "grad"):
            if of == "grad" and name in OF_PARAMETERS:
                continue
            model = made(plan)
            model(torch.ones(2, 6)).sum().backward()
            memory = getattr(model[0].weight, of)
            try:
                share(memory)[1:3] = 5.0
            except REFUSALS as error:
                found[name, of] = type(error)
                continue
            found[name, of] = values(getattr(model[0].weight, of))
    return found


@pytest.mark.parametrize("name", list(PLANS))
def test_a_write_is_there_or_refused(name):
    wanted = written(None)
    ranks = torch.Size(PLANS[name]["mesh"].values()).numel()
    for found in run_ranks(ranks, written, PLANS[name]):
        for case, expected in wanted.items():
            got = found[case]
            if case[1] == "data" and name in WHOLE:
                assert got not in REFUSALS, case
            if got not in REFUSALS:
                torch.testing.assert_close(got, expected, msg=lambda text, case=case: f"{case} {text}")


def read(plan):
    weight = made(plan)[0].weight.data
    activation = (weight * 2).numpy()
    activation[0] = 0  # nobody else sees it
    return [weight.numpy().sum(), weight.numpy(force=True).sum(), numpy.from_dlpack(weight, copy=True).sum()]


def test_what_is_read_alone_is_read():
    for plan in ("zero 3", "tp"):
        for found in run_ranks(2, read, PLANS[plan]):
            assert found == pytest.approx(read(None))


def hooked(plan):
    model, seen = made(plan), []
    parameters = list(model.parameters())
    register_multi_grad_hook(parameters, lambda given: seen.append(len(given)), mode="all")
    register_multi_grad_hook(parameters[:2], lambda given: seen.append([one is None for one in given]), mode="all")
    register_multi_grad_hook(parameters, lambda given: seen.append("any"), mode="any")
    edges = [torch.autograd.graph.get_gradient_edge(one).node.name() for one in parameters]
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        seen.append("backward")
        (model(torch.ones(2, 6)).sum() + parameters[0].square().sum()).backward()
        seen.append("and at rest")
    return seen, edges, [values(one.grad) for one in parameters]


@pytest.mark.parametrize("name", list(PLANS))
def test_a_hook_on_several_parameters_fires(name):
    seen, edges, gradients = hooked(None)
    for found, theirs, grads in run_ranks(torch.Size(PLANS[name]["mesh"].values()).numel(), hooked, PLANS[name]):
        assert sorted(map(str, found)) == sorted(map(str, seen))
        assert edges == theirs
        torch.testing.assert_close(grads, gradients)
