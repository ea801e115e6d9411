"""Doors beside the methods of a tensor: functions of torch, of C++ or of autograd, that take a tensor without asking
its class. Each is run on tensors of every state; the table is the documentation, as that of `test_doors`.

    GLOBAL      one device's answer
    ERRORS      a typed error, which names what to write instead
    LOCAL       this rank's part, by intent
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import graph
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import DTensor, Partial, RaggedShard, Replicate, Shard, VescaleError
from vescale_testkit import run_ranks
from vescale_testkit.oracle import spread

ON_FULL = torch.arange(24.0).view(4, 6) / 2 + 1
PLACES = {
    "replicated": Replicate(), "rows": Shard(0), "columns": Shard(1), "uneven": RaggedShard((0,), (1, 3)),
    "partial": Partial(),
}  # fmt: skip


# --- gradients, and hooks of autograd's nodes -------------------------------------------------------------------------


def leaf(t):
    return t.detach().clone().requires_grad_()


def gradient_of_a_plain_tensor(t):
    plain = torch.zeros(4, 6, requires_grad=True)
    plain.grad = t.detach()
    assert type(plain.grad) is torch.Tensor
    return plain.grad


def seen_by(register, loss=lambda y: (y * y).sum()):
    """What a hook on something of `y = 2 x` is handed, the gradients of x, and those with what it returns instead."""

    def door(t):
        seen, gradients = [], []
        for answer in (lambda given: None, lambda given: tuple(g.clamp(-30, 30) for g in given)):
            x = leaf(t)
            y = x * 2

            def hook(*given, answer=answer):
                seen.extend(g.clone() for g in given[-1])
                return answer(given[-1])

            register(x, y, hook)
            loss(y).backward()
            gradients.append(x.grad)
        return seen, gradients

    return door


def of_an_accumulation(t):
    x, seen = leaf(t), []
    node = x.expand_as(x).grad_fn.next_functions[0][0]
    node.register_hook(lambda into, out: seen.extend([*into, *out]))
    (x * x).sum().backward()
    return seen


def nodes(t):
    x = leaf(t)
    y = x * 2
    node = y.grad_fn
    assert node is y.grad_fn and node == y.grad_fn and len({node, y.grad_fn}) == 1 and isinstance(node, graph.Node)
    return node.name(), len(node.next_functions), node.metadata, x.grad_fn


def edge_to_a_leaf(t):
    x = leaf(t)
    return torch.autograd.grad((x * x).sum(), graph.get_gradient_edge(x))


def edge_by_hand(t):
    y = leaf(t) * 2
    return torch.autograd.grad((y * y).sum(), graph.GradientEdge(y.grad_fn, 0))


def several(mode):
    def door(t):
        one, other, seen = leaf(t), leaf(t * 2), []
        graph.register_multi_grad_hook(
            [one, other], lambda given: seen.append(given if mode == "all" else given.shape), mode=mode
        )
        (one * other).sum().backward()
        return seen

    return door


def saved(pack, unpack):
    def door(t):
        x = leaf(t)
        with graph.saved_tensors_hooks(pack, unpack):
            loss = (x * x.exp()).sum()
        loss.backward()
        return x.grad

    return door


def clipped(t):
    x = nn.Parameter(t.detach())
    (x * x).sum().backward()
    nn.utils.clip_grad_value_([x], 5.0)
    return x.grad


# --- functions of torch that walk over models or differentiate --------------------------------------------------------


class Product(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return (x @ self.weight.t()).sum(0)


class Twice(nn.Module):
    def forward(self, weight):
        return weight * 2 + weight.sum()


def trained(change, *names):
    def door(t):
        torch.manual_seed(0)
        model = nn.Linear(6, 4, bias=False)
        model.weight = nn.Parameter(t.detach())
        model = change(model) or model
        out = model(torch.ones(3, 6))
        out.sum().backward()
        return out, [model.get_parameter(name).grad for name in names]

    return door


def vectors(t):
    one, other = nn.Parameter(t.detach().clone()), nn.Parameter(t.detach().clone())
    nn.utils.vector_to_parameters(torch.arange(48.0), [one, other])
    return one.detach(), other.detach(), nn.utils.parameters_to_vector([one, other]).detach()


def exchanged(t):
    one, other = t.detach().clone(), (t * 2).detach().clone()
    torch.utils.swap_tensors(one, other)
    return one, other


def stacked(t):
    parameters, _ = torch.func.stack_module_state([Product(t.detach()), Product(t.detach() * 2)])
    return parameters["weight"].detach()


def doubled(model):
    nn.utils.parametrize.register_parametrization(model, "weight", Twice())


def full_hook(model):
    model.register_full_backward_hook(lambda module, into, out: None)


PARTS = ("parametrizations.weight.original0", "parametrizations.weight.original1")
square = torch.autograd.functional
GLOBAL = {
    "plain.grad = d": gradient_of_a_plain_tensor,
    "torch.FloatTensor(d)": lambda t: torch.FloatTensor(t) * 1,
    "torch.DoubleTensor(d)": lambda t: torch.DoubleTensor(t.double()) * 1,
    "torch.LongTensor(d)": lambda t: torch.LongTensor(t.long()) * 1,
    "torch.LongTensor of another dtype": torch.LongTensor,  # raises, as on one device
    "torch.FloatTensor of numbers": lambda t: torch.FloatTensor([t[0, 0], t[1, 1]]),
    "an old constructor's class": lambda t: (
        isinstance(t, torch.FloatTensor), isinstance(t, torch.LongTensor), t.type(torch.DoubleTensor),
        t.type("torch.LongTensor"), torch.FloatTensor.dtype, torch.LongTensor([3]), str(torch.FloatTensor),
    ),
    "grad_fn": nodes,
    "grad_fn.register_prehook": seen_by(lambda x, y, hook: y.grad_fn.register_prehook(hook)),
    "grad_fn.register_hook of a leaf": of_an_accumulation,
    "register_full_backward_hook": trained(full_hook, "weight"),
    "get_gradient_edge of a leaf": edge_to_a_leaf,
    "GradientEdge": edge_by_hand,
    "register_multi_grad_hook": several("all"),
    "register_multi_grad_hook, any": several("any"),
    "saved_tensors_hooks, cast": saved(lambda s: s.double(), lambda s: s.float()),
    "saved_tensors_hooks, scaled": saved(lambda s: (s / s.abs().max(), s.abs().max()), lambda s: s[0] * s[1]),
    "clip_grad_value_": clipped,
    "vector_to_parameters": vectors,
    "swap_tensors": exchanged,
    "func.functional_call": lambda t: torch.func.functional_call(
        Product(t.detach()), {"weight": t.detach() * 2}, (torch.ones(3, 6),)
    ),
    "func.stack_module_state": stacked,
    "parametrize": trained(doubled, "parametrizations.weight.original"),
    "parametrizations.weight_norm": trained(nn.utils.parametrizations.weight_norm, *PARTS),
    "parametrizations.spectral_norm": trained(
        nn.utils.parametrizations.spectral_norm, "parametrizations.weight.original"
    ),
    "prune": lambda t: trained(lambda m: nn.utils.prune.l1_unstructured(m, "weight", amount=5), "weight_orig")(t),
    "functional.jacobian": lambda t: square.jacobian(lambda x: (x * x).sum(1), t.detach()),
    "functional.jacobian, vectorized": lambda t: square.jacobian(lambda x: (x * x).sum(1), t.detach(), vectorize=True),
    "functional.hessian": lambda t: square.hessian(lambda x: (x**3).sum(), t.detach()[:2, :2]),
    "functional.vjp": lambda t: square.vjp(lambda x: x * x, t.detach(), torch.ones(4, 6)),
    "functional.jvp": lambda t: square.jvp(lambda x: x * x, t.detach(), torch.ones(4, 6)),
    "functional.hvp": lambda t: square.hvp(lambda x: (x**3).sum(), t.detach(), torch.ones(4, 6)),
}  # fmt: skip


# --- what is refused --------------------------------------------------------------------------------------------------


def legacy_module_hook(t):
    module = nn.Tanh()
    module.register_backward_hook(lambda m, i, o: None)
    module(leaf(t)).sum().backward()


def of_an_operand(t):
    y = leaf(t) * 2
    y.grad_fn.register_hook(lambda into, out: None)


def inner_node(t):
    y = (leaf(t) * 2).exp()
    y.grad_fn.next_functions[0][0].register_prehook(lambda out: None)


def edge_inside(t):
    y = leaf(t) * 2
    torch.autograd.grad((y * y).sum(), graph.get_gradient_edge(y))


def beside_torchs(function):
    def door(t):
        theirs = torch.distributed.tensor.distribute_tensor(torch.ones(4, 6), t.device_mesh, [Shard(0)])
        function(t.detach().clone(), theirs)

    return door


def _set_grad(ours, theirs):
    ours.requires_grad_().grad = theirs


def _set_data(ours, theirs):
    ours.data = theirs


def of_a_group(call):
    def door(t):
        plain = [torch.ones(4, 6) for _ in range(2)]
        call(dist.group.WORLD, t.detach(), plain)

    return door


def of_a_backend(t):
    dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([t.detach()])


def theirs_of_ours(t):
    torch.distributed.tensor.DTensor.from_local(t, t.device_mesh, [Shard(0)]).full_tensor()


GROUP = {
    "allreduce": lambda g, d, plain: g.allreduce([d]),
    "allreduce of one": lambda g, d, plain: g.allreduce(d),
    "allreduce, named": lambda g, d, plain: g.allreduce(tensors=[d]),
    "allreduce_coalesced": lambda g, d, plain: g.allreduce_coalesced([d]),
    "broadcast": lambda g, d, plain: g.broadcast([d]),
    "broadcast of one": lambda g, d, plain: g.broadcast(d, 0),
    "reduce": lambda g, d, plain: g.reduce([d]),
    "allgather": lambda g, d, plain: g.allgather([plain], [d]),
    "allgather into": lambda g, d, plain: g.allgather([[d, d]], [plain[0]]),
    "_allgather_base": lambda g, d, plain: g._allgather_base(torch.ones(8, 6), d),
    "allgather_coalesced": lambda g, d, plain: g.allgather_coalesced([[p] for p in plain], [d]),
    "gather": lambda g, d, plain: g.gather([plain], [d]),
    "scatter": lambda g, d, plain: g.scatter([plain[0]], [[d, d]]),
    "reduce_scatter": lambda g, d, plain: g.reduce_scatter([plain[0]], [[d, d]]),
    "_reduce_scatter_base": lambda g, d, plain: g._reduce_scatter_base(torch.ones(2, 6), d),
    "alltoall": lambda g, d, plain: g.alltoall(plain, [d, d]),
    "alltoall_base": lambda g, d, plain: g.alltoall_base(plain[0], d, [], []),
    "send": lambda g, d, plain: g.send([d], 1, 0),
    "recv": lambda g, d, plain: g.recv([d], 1, 0),
    "recv_anysource": lambda g, d, plain: g.recv_anysource([d], 0),
}
COLLECTIVES = {
    "all_gather": lambda d, plain: dist.all_gather(plain, d),
    "all_gather into": lambda d, plain: dist.all_gather([d, d], plain[0]),
    "all_gather_into_tensor": lambda d, plain: dist.all_gather_into_tensor(torch.ones(8, 6), d),
    "gather": lambda d, plain: dist.gather(d, plain if dist.get_rank() == 0 else None),
    "scatter into": lambda d, plain: dist.scatter(d, plain if dist.get_rank() == 0 else None),
    "reduce_scatter": lambda d, plain: dist.reduce_scatter(plain[0], [d, d]),
    "reduce_scatter into": lambda d, plain: dist.reduce_scatter(d, plain),
    "reduce_scatter_tensor": lambda d, plain: dist.reduce_scatter_tensor(torch.ones(2, 6), d),
    "all_to_all": lambda d, plain: dist.all_to_all(plain, [d, d]),
    "all_to_all into": lambda d, plain: dist.all_to_all([d, d], plain),
    "all_to_all_single": lambda d, plain: dist.all_to_all_single(plain[0], d),
    "send": lambda d, plain: dist.send(d, 1 - dist.get_rank()),
    "isend": lambda d, plain: dist.isend(d, 1 - dist.get_rank()),
    "irecv": lambda d, plain: dist.irecv(d, 1 - dist.get_rank()),
    "batch_isend_irecv": lambda d, plain: dist.batch_isend_irecv([dist.P2POp(dist.isend, d, 1 - dist.get_rank())]),
}
ERRORS = {
    "register_backward_hook": legacy_module_hook,
    "grad_fn.register_hook": of_an_operand,
    "hooks of inner nodes": inner_node,
    "get_gradient_edge of a result": edge_inside,
    "func.grad": lambda t: torch.func.grad(lambda x: (x * x).sum())(t.detach()),
    "func.vmap": lambda t: torch.func.vmap(lambda x: x.sum())(t.detach()),
    "torch's DTensor, added": beside_torchs(lambda d, o: d + o),
    "torch's DTensor, added to": beside_torchs(lambda d, o: o + d),
    "torch's DTensor, multiplied": beside_torchs(lambda d, o: nn.functional.linear(o, d)),
    "torch's DTensor, in a list": beside_torchs(lambda d, o: torch.cat([o, d])),
    "torch's DTensor, copied": beside_torchs(lambda d, o: d.copy_(o)),
    "torch's DTensor, copied into": beside_torchs(lambda d, o: o.copy_(d)),
    "torch's DTensor, an index": beside_torchs(lambda d, o: d[o.long()]),
    "torch's DTensor, data": beside_torchs(_set_data),
    "torch's DTensor, gradient": beside_torchs(_set_grad),
    "torch's distribute_tensor": lambda t: torch.distributed.tensor.distribute_tensor(t, t.device_mesh, [Shard(0)]),
    "torch's from_local": theirs_of_ours,
    "a backend's allreduce": of_a_backend,
    **{f"a group's {name}": of_a_group(call) for name, call in GROUP.items()},
    **{
        f"dist.{name}": lambda t, call=call: call(t.detach(), [torch.ones(4, 6) for _ in range(2)])
        for name, call in COLLECTIVES.items()
    },
}


def plain(value):
    if type(value) is DTensor:
        return value.detach().full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(found, torch.Tensor) and found.shape == expected.shape and found.dtype == expected.dtype
            and torch.allclose(found.double(), expected.double(), rtol=1e-5, atol=1e-6)
        )  # fmt: skip
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def global_answers():
    warnings.simplefilter("ignore")
    mesh, wrong = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
    for name, door in GLOBAL.items():
        for place, placement in PLACES.items():
            outcomes = []
            for tensor in (ON_FULL.clone(), spread(ON_FULL.clone(), mesh, [placement])):
                try:
                    outcomes.append(plain(door(tensor)))
                except VescaleError as error:
                    outcomes.append(f"refused: {error}")
                except Exception as error:
                    outcomes.append(type(error))
            if not same(outcomes[1], outcomes[0]):
                wrong.append((name, place, str(outcomes[1])[:300], str(outcomes[0])[:300]))
    return wrong


def refusals():
    warnings.simplefilter("ignore")
    import torch.distributed.tensor  # noqa: F401

    mesh, wrong = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
    for name, door in ERRORS.items():
        for place, placement in PLACES.items():
            try:
                door(spread(ON_FULL.clone(), mesh, [placement]))
            except VescaleError as error:
                if "fix" not in str(error):
                    wrong.append((name, place, str(error)[:300]))
            except Exception as error:
                wrong.append((name, place, repr(error)[:300]))
            else:
                wrong.append((name, place, "is not refused"))
    return wrong


def local_answers():
    """A hook on saved tensors keeps memory, and is handed this rank's, as plain tensors."""
    mesh, wrong = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
    for place, placement in PLACES.items():
        x, seen = leaf(spread(ON_FULL.clone(), mesh, [placement])), []
        with graph.saved_tensors_hooks(lambda s, seen=seen: (seen.append(s), s)[1], lambda s: s):
            loss = (x * x).sum()
        loss.backward()
        held = [tuple(one.to_local().shape) if type(one) is DTensor else tuple(one.shape) for one in seen]
        local = (4, 6) if place in ("replicated", "partial") else tuple(x.to_local().shape)
        if not seen or set(held) != {local}:
            wrong.append((place, held, local))
    return wrong


@pytest.mark.parametrize("answers", [global_answers, refusals, local_answers])
def test_every_door_answers_as_the_table_says(answers):
    assert run_ranks(2, answers, timeout=200) == [[], []]


# Where only the source has something to look at, the others wait for it in torch's code.
FROM_ONE = {
    "scatter": lambda d, g, sends: dist.scatter(torch.ones(4, 6), sends and [d] * 3, group=g),
    "broadcast_object_list": lambda d, g, sends: dist.broadcast_object_list([d if sends else 0], group=g),
    "scatter_object_list": lambda d, g, sends: dist.scatter_object_list([None], sends and [d] * 3, group=g),
}


def sent_by_the_source(name):
    mesh = init_device_mesh("cpu", (3,))
    group, shard = dist.new_group([0, 1, 2]), spread(ON_FULL.clone(), mesh, [Replicate()])
    dist.barrier(group)  # a rank that is refused at once would end its group while the others connect to it
    try:
        FROM_ONE[name](shard, group, dist.get_rank() == 0 or None)
    except Exception as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("name", FROM_ONE)
def test_what_the_source_alone_is_refused_no_rank_waits_for(name):
    assert run_ranks(3, sent_by_the_source, name, timeout=60) == ["OperatorError", "RuntimeError", "RuntimeError"]
