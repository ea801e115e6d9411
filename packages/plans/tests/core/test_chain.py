"""The chain of a module's steps: their order, among users' hooks and without them; what is ended when a call raises."""

import copy
import functools
import inspect
import threading
import warnings

import pytest
import torch
from torch import nn

from vescale_plans import explain_calls
from vescale_plans._calls.chain import Call, Chain, add_step
from vescale_plans._calls.phases import INNER_AFTER, INNER_BEFORE, OUTER_AFTER, OUTER_BEFORE, PHASES

X = torch.ones(2)


class Block(nn.Module):
    """Notes its calls, and calls itself, raises, or does something else in its midst, as it is told."""

    def __init__(self, noted):
        super().__init__()
        self.noted, self.midst = noted, None
        self.child = nn.Identity()

    def forward(self, x, scale=1.0):
        self.noted.append("forward")
        if self.midst is not None:
            self.midst()
        return self.child(x) * scale


def noting(noted, name):
    return (lambda *given: noted.append(f"{name} begins")), (lambda *given: noted.append(f"{name} ends"))


def chained(names, noted=None):
    """A block with a step in each of these phases, added in this order."""
    noted = [] if noted is None else noted
    block = Block(noted)
    steps = {name: add_step(block, name, *noting(noted, name)) for name in names}
    return block, noted, steps


def user_hook(noted, name):
    return lambda *given: noted.append(name)


def every_way(block):
    """torch comes to the steps by hooks where anybody else has one on the module, else the chain goes through them."""
    yield "alone"
    handle = block.register_forward_pre_hook(lambda module, args: None)
    yield "beside a user's hook"
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    yield "under a hook of all modules"
    handle.remove()


def test_steps_come_in_the_tables_order_in_whichever_they_were_added():
    wanted = [*(f"{name} begins" for name in (*OUTER_BEFORE, *INNER_BEFORE)), "forward"]
    wanted += [f"{name} ends" for name in (*INNER_AFTER, *OUTER_AFTER)]
    for names in (list(PHASES), list(PHASES)[::-1]):
        noted = []
        block = Block(noted)
        for name in names:
            begins, ends = noting(noted, name)
            before, after = name in OUTER_BEFORE + INNER_BEFORE, name in INNER_AFTER + OUTER_AFTER
            add_step(block, name, begins if before else None, ends if after else None)
        for way in every_way(block):
            noted.clear()
            block(X)
            assert noted == wanted, way


def test_users_hooks_keep_their_places():
    noted = []
    block = Block(noted)
    block.register_forward_pre_hook(user_hook(noted, "before, early"))
    block.register_forward_hook(user_hook(noted, "after, early"))
    for name in ("parameters", "boundary", "experts"):
        add_step(block, name, *noting(noted, name))
    block.register_forward_pre_hook(user_hook(noted, "before, late"))
    block.register_forward_hook(user_hook(noted, "after, late"))
    block.register_forward_pre_hook(user_hook(noted, "before, first"), prepend=True)
    block(X)
    assert noted == [
        "before, first", "parameters begins", "before, early", "boundary begins", "experts begins", "before, late",
        "forward",
        "experts ends", "after, early", "boundary ends", "parameters ends", "after, late",
    ]  # fmt: skip


def test_steps_change_arguments_and_results():
    block, _, _ = chained(())
    add_step(block, "inputs", lambda m, args, kwargs: (tuple(2 * one for one in args), {**kwargs, "scale": 3.0}))
    add_step(block, "boundary", after=lambda m, args, kwargs, output: output + args[0].sum() + kwargs["scale"])
    for way in every_way(block):
        assert block(X, scale=7.0).tolist() == [2 * 3 + 4 + 3] * 2, way


@pytest.mark.parametrize("error", (ValueError, KeyboardInterrupt))
def test_what_has_begun_is_ended_where_a_call_raises(error):
    """And only that: not what never began, nor what ends with a call alone."""

    def fails(*given):
        raise error

    block, noted, _ = chained(("sharing", "saving", "checkpoint", "parameters"))
    begun = ["parameters begins", "sharing begins", "saving begins", "checkpoint begins"]
    for way in every_way(block):
        noted.clear()
        block.midst = fails
        with pytest.raises(error):
            block(X)
        assert noted == [*begun, "forward", "checkpoint ends", "saving ends", "sharing ends"], way
        block.midst = None
        step = add_step(block, "loss", before=fails)
        noted.clear()
        with pytest.raises(error):
            block(X)
        assert noted == [*begun, "checkpoint ends", "saving ends", "sharing ends"], way
        step.remove()
        step = add_step(block, "inputs", before=fails)
        noted.clear()
        with pytest.raises(error):
            block(X)
        assert noted == begun[:1], way
        step.remove()
        step = add_step(block, "loss", after=fails)
        noted.clear()
        with pytest.raises(error):
            block(X)
        assert noted == [*begun, "forward", "checkpoint ends", "saving ends", "sharing ends"], way
        step.remove()
        noted.clear()
        block(X)  # nothing is left of the calls that raised
        assert noted == [*begun, "forward", "checkpoint ends", "saving ends", "sharing ends", "parameters ends"], way


def test_an_end_that_raises_keeps_the_first_error_and_the_other_ends():
    block, noted, _ = chained(("sharing",))

    def fails(*given):
        raise ValueError("the end")

    add_step(block, "checkpoint", lambda *given: None, fails)
    block.midst = lambda: (_ for _ in ()).throw(KeyError("the forward"))
    for _ in every_way(block):
        noted.clear()
        with warnings.catch_warnings(record=True) as caught, pytest.raises(KeyError, match="the forward"):
            warnings.simplefilter("always")
            block(X)
        assert noted == ["sharing begins", "forward", "sharing ends"]
        assert any("'checkpoint'" in str(one.message) and "the end" in str(one.message) for one in caught)


def test_a_module_that_calls_itself():
    block, noted, _ = chained(("sharing", "experts"))
    once = ["sharing begins", "experts begins", "forward"], ["experts ends", "sharing ends"]

    def again():
        block.midst = None
        block(X)

    def again_and_fails():
        again()
        raise ValueError

    for way in every_way(block):
        noted.clear()
        block.midst = again
        block(X)
        assert noted == [*once[0], *once[0], *once[1], *once[1]], way
        noted.clear()
        block.midst = again_and_fails
        with pytest.raises(ValueError):
            block(X)
        assert noted == [*once[0], *once[0], *once[1], *once[1]], way


def test_two_threads_call_one_module():
    """One begins while the other is in its midst, and ends after it."""
    block, noted, _ = chained(("sharing", "experts"))
    inside, go_on, failed = threading.Event(), threading.Event(), []

    def waits():
        block.midst = None
        inside.set()
        assert go_on.wait(20)

    for way in every_way(block):
        inside.clear()
        go_on.clear()
        noted.clear()
        block.midst = waits
        other = threading.Thread(target=lambda: failed.extend(raised(block)))
        other.start()
        assert inside.wait(20)
        failed.extend(raised(block))
        go_on.set()
        other.join()
        assert not failed and sorted(noted) == sorted(2 * ["sharing begins", "experts begins", "forward",
                                                           "experts ends", "sharing ends"]), way  # fmt: skip


def raised(block):
    """What a call raises."""
    try:
        block(X)
    except Exception as error:
        return [error]
    return []


def test_an_inner_call_that_a_hook_refuses_ends_nothing_of_the_outer_one():
    block, noted, _ = chained(("sharing",))
    calls = []

    def refuses(module, args):
        calls.append(None)
        if len(calls) > 1:
            raise ValueError

    block.register_forward_pre_hook(refuses, prepend=True)

    def again():
        with pytest.raises(ValueError):
            block(X)
        noted.append("refused")

    block.midst = again
    block(X)
    assert noted == ["sharing begins", "forward", "refused", "sharing ends"]


def test_steps_and_hooks_that_come_and_go_amid_a_call():
    block, noted, steps = chained(("sharing", "experts"))
    for way in every_way(block):
        noted.clear()
        block.midst = steps["experts"].remove
        block(X)  # a call ends what it has begun
        assert noted == ["sharing begins", "experts begins", "forward", "experts ends", "sharing ends"], way
        noted.clear()
        block.midst = None
        block(X)
        assert noted == ["sharing begins", "forward", "sharing ends"], way
        noted.clear()
        block.midst = lambda: steps.update(experts=add_step(block, "experts", *noting(noted, "experts")))
        block(X)  # and nothing else
        assert noted == ["sharing begins", "forward", "sharing ends"], way
        block.midst = None
    handles = []
    block.midst = lambda: handles.append(block.register_forward_pre_hook(user_hook(noted, "user")))
    for _ in range(2):
        block(X)
    assert noted[-6:] == ["sharing begins", "experts begins", "user", "forward", "experts ends", "sharing ends"]


def test_nothing_is_left_of_steps_that_are_taken_away():
    block = Block([])
    before = set(block.__dict__)
    steps = [add_step(block, name, lambda *given: None, lambda *given: None) for name in PHASES]
    assert isinstance(block._call_impl, Call)
    for step in steps:
        step.remove()
    assert not block._forward_pre_hooks and not block._forward_hooks and "_call_impl" not in block.__dict__
    assert set(block.__dict__) - before <= {"__getstate__"}


def test_a_shallow_copy_runs_itself_and_has_the_steps():
    block, noted, _ = chained(("sharing",))
    other = copy.copy(block)
    other.child = nn.Linear(2, 2)
    other.forward = lambda x: noted.append("another forward")
    other(X)
    assert noted == ["sharing begins", "another forward", "sharing ends"]
    noted.clear()

    def fails(x):
        raise ValueError

    other.forward = fails
    with pytest.raises(ValueError):
        other(X)
    assert noted == ["sharing begins", "sharing ends"]


def test_a_forward_put_on_the_module_later():
    """As accelerate does it, by a wrapper, and back again."""
    block, noted, _ = chained(("sharing",))
    assert list(inspect.signature(block.forward).parameters) == ["x", "scale"]
    own = block.forward

    @functools.wraps(own)
    def mine(*args, **kwargs):
        noted.append("wrapper")
        return own(*args, **kwargs)

    block.forward = mine
    assert list(inspect.signature(block.forward).parameters) == ["x", "scale"]
    block(X)
    assert noted == ["sharing begins", "wrapper", "forward", "sharing ends"]
    noted.clear()
    del block.forward
    block(X)
    assert noted == ["sharing begins", "forward", "sharing ends"]


def test_backward_hooks_of_users_are_called():
    block, _, _ = chained(("sharing", "boundary"))
    x, seen = X.clone().requires_grad_(), []
    block.register_full_backward_hook(lambda module, into, out: seen.append(out[0].tolist()))
    block(x, scale=2.0).sum().backward()
    assert seen == [[1.0, 1.0]] and x.grad.tolist() == [2.0, 2.0]


def test_torch_comes_to_all_steps_by_one_chain():
    block, _, _ = chained(("experts", "sharing"))
    block.register_forward_hook(user_hook([], "user"))
    hooks = [*block._forward_pre_hooks.values(), *block._forward_hooks.values()]
    chains = {id(hook.__self__) for hook in hooks if isinstance(getattr(hook, "__self__", None), Chain)}
    assert len(chains) == 1 and len(hooks) == 6
    called = [(step.when, step.what.rpartition(".")[2]) for step in explain_calls(block).steps[""]]
    assert [when for when, _ in called] == ["before"] * 2 + ["forward"] + ["after"] * 3
