"""What rules say of their functions is true, by numbers; and users' traits are heeded as ours are."""

import contextlib
import itertools
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from vescale_dtensor import (
    DTensor,
    Partial,
    RaggedShard,
    Shard,
    ViewError,
    comm_trace,
    distribute_tensor,
    register_rule,
    reproducible,
)
from vescale_dtensor._rules.registry import TABLE, Entry
from vescale_dtensor.rules import Signature, Trait, traits_of
from vescale_testkit import mesh_of, run_ranks, slice_of
from vescale_testkit.operator_sweep import database
from vescale_testkit.trait_check import Watch

SLICES = 8
SAMPLES = 6


def inside(*values):
    """Numbers between 0 and 1, where every function is defined."""
    return torch.rand(*values, generator=torch.Generator().manual_seed(sum(values))) * 0.8 + 0.1


def arguments():
    """Ways to call a function: most functions of the table take some of them."""
    x, y, z = inside(3, 5), inside(3, 5) + 0.05, inside(3, 5) + 0.1
    i, j, b = torch.arange(1, 16).view(3, 5), torch.arange(2, 17).view(3, 5), x > 0.5
    c = torch.complex(x, y)
    yield from ([x], [x, y], [x, 2.0], [x, 2], [2.0, x], [x, y, z], [x, b, 0.5], [b, x, y], [x, y, 0.5], [x, 0.1, 0.9])
    yield from ([x, 1], [x, 0, 1], [x, 1, 0], [x, (5, 3)], [x, (15,)], [x, torch.float64], [x, 1, 1, 2], [x, 0, (3, 5)])
    yield from ([x, y.T], [x.reshape(1, 3, 5), y.T.reshape(1, 5, 3)], [x[0], y[0]], [x[0]], [x, y[0]], [y[0], x])
    yield from ([i], [i, j], [i, 2], [2, i], [b], [b, b], [c], [c, c], [c, 2.0], [x, (1, 2)], [x, 5, 1], [x, 1, 2])
    yield from ([x.view(3, 5, 1)], [x.view(1, 3, 5)], [inside(4, 2)], [inside(3, 3)], [x, [1, 2]], [inside(2, 4, 6), 2])
    yield [torch.stack([x, y], -1)]
    yield from ([x, [2, 3], 1], [x, "torch.FloatTensor"], [x, (1, 1), (1, 1)], [x, inside(15)], [x, 3, (3, 5)])
    yield from ([x, (3, 5), (5, 1)], [x, torch.float64, False, 5], [x, (3, 5), (5, 1), 0], [i[0, 0]], [x[0, 0]])
    yield from ([x, 0.5, True], [x, 0.5, False], [inside(2, 3, 4, 4), 0.5, True], [x, 0.1, 0.4, True])
    yield [[x, y]]
    lists = [inside(3, 5), inside(2, 4)], [inside(3, 5) + 0.1, inside(2, 4) + 0.1], [inside(3, 5), inside(2, 4)]
    yield from ([lists[0]], [*lists[:2]], [*lists], [lists[0], 2.0], [lists[0], [2.0, 3.0]], [*lists[:2], 0.5])
    yield [[inside(3, 3), inside(4, 4)], [inside(3, 3), inside(4, 4)]]
    sums = [inside(3, 5), inside(2, 4)]
    steps = [torch.tensor(2.0), torch.tensor(3.0)]
    yield [lists[0], lists[1], sums, lists[2], [], steps]
    yield [lists[0], lists[1], sums]
    yield [lists[0], lists[1], sums, steps]
    query = inside(1, 2, 4, 4)
    yield [query, query, query, None, 0.5]
    yield [nn.Parameter(inside(4, 4))]
    yield [nn.Parameter(inside(4, 4)), 0.1]
    yield from ([x, 0.5], [-x, 0.1, 0.4, True], [inside(1, 2, 8, 8), 2, 3], [inside(1, 2, 8, 8, 8), 2, 3])
    yield from ([x, 4], [x.double(), 2.0], [i, 1], [x, (1, 0)], [x, (0,)], [x[:1], (3, 5)], [x, 1, (5, 1)])
    yield [i, x]


PLAIN = {"lr": 0.1, "weight_decay": 0.0, "maximize": False}
FUSED = [
    PLAIN | {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False},
    PLAIN | {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False},
    PLAIN | {"lr_decay": 0.0, "eps": 1e-8},
]
# Not to be tried: without contents, of a device that is not here, of another tensor's dtype; recurrent networks; of
# vectors alone, which torch's samples have.
NOT_TRIED = """empty_like new_empty new_empty_strided cuda type_as rnn_relu rnn_tanh lstm gru
    multi_head_attention_forward meshgrid""".split()


def call_every_way(watch, function):
    """Until all that its traits promise was tried."""
    own = [trait for trait in Trait if trait in TABLE[function].traits and trait is not Trait.LISTS]
    if Trait.DRAWS in own:
        own = [Trait.DRAWS]
    for given in arguments():
        if all(function in watch.tried[trait] for trait in own):
            return
        if "split" in str(function) and str(given[1:]) in ("[5, 1]", "[1, 0]", "[(5, 3)]"):
            continue  # pieces that overlap
        if "__get__" in str(function) and len(given) > 1:
            continue
        for named in FUSED if "_fused" in str(function) else [{}]:
            with contextlib.suppress(Exception):  # operators do not come to a mode under their own names
                watch.__torch_function__(function, (), tuple(given), named)


def test_every_trait_is_true_and_every_function_that_has_one_was_tried():
    watch = Watch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function in list(TABLE):
            if TABLE[function].traits:
                call_every_way(watch, function)
    assert not watch.wrong, "\n".join(watch.wrong)
    for trait in set(Trait) - {Trait.LISTS}:
        said = {f for f, entry in TABLE.items() if trait in entry.traits}
        if trait is not Trait.DRAWS:
            said = {f for f in said if Trait.DRAWS not in TABLE[f].traits}
        names = {str(getattr(f, "__qualname__", f)).rpartition(".")[2] for f in said - watch.tried[trait]}
        names = sorted(names - set(NOT_TRIED))
        assert not names, f"{trait} was never tried of {names}"


SAMPLED = [name for name in database() if not name.startswith("jiterator")]  # which wants a GPU


@pytest.mark.parametrize("name", slice_of(SAMPLED, SLICES))
def test_traits_hold_on_what_torch_samples(name):
    info, watch = database()[name], Watch()
    own = (info, *info.aliases)
    variants = [getattr(one, kind, None) for one in own for kind in ("op", "method_variant", "inplace_variant")]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=False), SAMPLES):
            if any(isinstance(x, Tensor) and x.numel() > 5000 for x in tree_leaves(sample.input)):
                continue
            for variant in filter(None, variants):
                given = (sample.input, sample.args, sample.kwargs)
                first, args, kwargs = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, given)
                with contextlib.suppress(RuntimeError, TypeError, NotImplementedError), watch:
                    variant(first, *args, **kwargs)
    assert not watch.wrong, "\n".join(watch.wrong)


FALSE = {
    torch.cumsum: Trait.ELEMENTWISE,
    torch.softmax: Trait.ELEMENTWISE,
    torch.flip: Trait.ELEMENTWISE,
    torch.exp: Trait.LINEAR,
    torch.abs: Trait.LINEAR,
    torch.neg: Trait.MOVES,
    torch.sort: Trait.METADATA,
    torch.relu: Trait.VIEW,
    torch.sum: Trait.READS,
    Tensor.expand_as: Trait.MOVES,
    torch.gather: Trait.MOVES,
    torch.transpose: Trait.ORDERED,
}


@pytest.mark.parametrize("function", FALSE, ids=lambda f: f.__name__)
def test_what_is_not_so_is_found(function):
    watch, own = Watch(), TABLE[function]
    dict.__setitem__(TABLE, function, Entry(function, own.rule, traits=FALSE[function]))
    try:
        call_every_way(watch, function)
        with contextlib.suppress(RuntimeError), watch:
            torch.gather(inside(3, 5), 1, torch.zeros(3, 5, dtype=torch.long))
            inside(1, 5).expand_as(inside(3, 5))
    finally:
        dict.__setitem__(TABLE, function, own)
    trait = FALSE[function]
    assert watch.wrong or function not in watch.tried[trait]


# --- users' rules -----------------------------------------------------------------------------


def overridable(body, name="own"):
    """A function that asks `__torch_function__`, as a library's own would."""

    def function(x):
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(function, (x,), x)
        return body(x)

    function.__name__ = name
    return function


def same_dims(call):
    dims = tuple(range(call.operands[0].ndim))
    return Signature([dims], [dims])


def named_as(module):
    """The same rule, as if it stood in a module of that name."""

    def rule(call):
        return same_dims(call)

    rule.__module__ = module
    return rule


FLAT = RaggedShard((0, 1), (11, 13))


def test_on_a_flat_shard_the_traits_decide_and_not_the_names_of_modules() -> None:
    def run() -> None:
        mesh = mesh_of(2, names=("dp",))
        x = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [FLAT])
        for module in ("pointwise", "my.metadata", "optim", "mine"):
            known, unknown = overridable(torch.exp), overridable(lambda x: x.flip(0))
            register_rule(known, traits=Trait.ELEMENTWISE)(named_as(module))
            register_rule(unknown)(named_as(module))
            with comm_trace() as trace:
                y = known(x)
            assert not len(trace) and y.placements == (FLAT,)
            assert torch.equal(y.full_tensor(), torch.exp(x.full_tensor()))
            assert torch.equal(unknown(x).full_tensor(), x.full_tensor().flip(0))

    run_ranks(2, run)


def test_a_linear_function_is_so_in_its_first_tensor() -> None:
    def run() -> None:
        mesh = mesh_of(2, names=("tp",))
        triple = overridable(lambda x: 3 * x)
        register_rule(triple, traits=Trait.ELEMENTWISE | Trait.LINEAR)(same_dims)
        x = DTensor.from_local(torch.ones(4) * (torch.distributed.get_rank() + 1), mesh, [Partial()])
        with comm_trace() as trace:
            y = triple(x)
        assert not len(trace) and y.placements == (Partial(),) and y.full_tensor().eq(9).all()

    run_ranks(2, run)


def test_a_view_of_a_user_is_guarded_where_it_is_a_copy() -> None:
    def run() -> None:
        mesh = mesh_of(2, names=("tp",))
        turned = overridable(lambda x: x.view(-1))

        @register_rule(turned, traits=Trait.VIEW)
        def rule(call):
            (shape,) = [call.operands[0].shape]
            return Signature([(None, None)], [(None,)], shapes=[(shape[0] * shape[1],)])

        x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
        with pytest.raises(ViewError):
            turned(x).add_(1)

    run_ranks(2, run)


def test_another_rule_is_no_other_function() -> None:
    own = overridable(torch.exp)
    register_rule(own, traits=Trait.ELEMENTWISE)(same_dims)
    register_rule(own)(lambda call: None)
    assert traits_of(own) is Trait.ELEMENTWISE
    register_rule(own, traits=Trait.MOVES)(same_dims)
    assert traits_of(own) is Trait.MOVES
    assert traits_of(overridable(torch.exp)) is Trait(0)


def in_mode(own, x, mode):
    """Values and the gradient, in the mode."""
    x = x.detach().requires_grad_()
    with mode:
        y = own(x)
        (y * y).sum().backward()
    full = lambda t: t.full_tensor() if type(t) is DTensor else t
    return [full(t.detach()) for t in (y, x.grad)]


def test_in_the_reproducible_mode_traits_decide() -> None:
    def run() -> None:
        mesh = mesh_of(2, names=("dp",))
        whole = torch.rand(8, 6, generator=torch.Generator().manual_seed(1))
        bodies = {
            Trait.ELEMENTWISE: lambda x: x.exp() * x.sigmoid(),
            Trait.MOVES: lambda x: x.flip(1),
            Trait(0): lambda x: x.softmax(0),
        }
        for traits, body in bodies.items():
            own, mode = overridable(body), reproducible()

            @register_rule(own, traits=traits)
            def rule(call, known=bool(traits)):
                return same_dims(call) if known else Signature([(None, 1)], [(None, 1)])

            alone = in_mode(own, whole, mode)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = in_mode(own, distribute_tensor(whole, mesh, [Shard(0)]), mode)
            gathered = [w for w in said if "no canonical form" in str(w.message)]
            assert bool(gathered) == (not traits), "without traits it runs whole, and says so"
            assert all(torch.equal(a, b) for a, b in zip(alone, found)), traits

    run_ranks(2, run)


def test_a_rule_registered_in_the_mode_or_between_two_entries_of_it_stays() -> None:
    def run() -> None:
        mesh = mesh_of(2, names=("dp",))
        mode, asked = reproducible(), []
        first, second, known = overridable(torch.exp), overridable(torch.exp), overridable(torch.exp)
        x = distribute_tensor(torch.rand(4, 6), mesh, [Shard(0)])

        def noting(what):
            def rule(call):
                asked.append(what)
                return same_dims(call)

            return rule

        register_rule(known, traits=Trait.ELEMENTWISE)(noting("before"))
        with mode:
            known(x)
            register_rule(first, traits=Trait.ELEMENTWISE)(noting("inside"))
            register_rule(known)(noting("anew"))
            first(x), known(x)
            assert set(asked) == {"before", "inside", "anew"}
        asked.clear()
        first(x), known(x)
        assert asked == ["inside", "anew"]
        register_rule(second, traits=Trait.ELEMENTWISE)(noting("between"))
        register_rule(known)(noting("anew again"))
        asked.clear()
        with mode:
            second(x), known(x)
        second(x), known(x)
        assert set(asked) == {"between", "anew again"}

    run_ranks(2, run)


def test_no_rule_of_the_table_is_lost_by_a_mode() -> None:
    before = dict(TABLE)
    mode = reproducible()
    for _ in range(2):
        with mode:
            F.linear(torch.ones(8, 8), torch.ones(8, 8)).sum()
    assert {f: TABLE[f] for f in before} == before
