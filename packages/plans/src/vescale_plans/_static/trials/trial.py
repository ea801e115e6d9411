"""The trial of one frame: does the module's own code do the same on plain local tensors?

The module's own code is what its forward does outside of the modules that it calls. It is
tried at the end of the recorded call, while inputs and results are at hand: once more, on
plain tensors, where every module that it calls answers with what it gave the first time.
So a trial computes nothing twice but the module's own few operators, communicates not at
all, and draws no number; what would need more is judged from the tape alone.
"""

from __future__ import annotations

import linecache
from collections import OrderedDict
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from vescale_dtensor import DTensor
from vescale_dtensor.engine import (
    Comparison,
    Conversion,
    Crossing,
    Difference,
    Op,
    Pairs,
    Storages,
    Taping,
    graph_difference,
    is_users,
    local_only,
    refs_of,
    same_bits,
    unwrap,
    wrap,
)

from ..._apply.containers import map_tensors
from ..._calls.chain import hooks_after, hooks_before
from ..frame import Frame, odd_value, parameter_place, tensors_of
from ..guard import FORWARD_HOOKS, has_gradient_hooks
from ..passes import entered
from ..threads import outlasts
from .forbidden import copied, forbidden, storages_in, why_not
from .hoisting import hoisted


class _Left(BaseException):
    """A trial that has parted from the recorded pass, or would do what a trial must not. No user code catches it."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class _Parted(BaseException):
    """What a trial is about to do is not what the recorded pass did. No user code catches it."""


def judge(frame: Frame, storages: Storages) -> Difference | None:
    """Why the module's own code cannot run on plain tensors, or None; sets the frame's boundary."""
    odd = odd_value((frame.args, frame.kwargs)) or odd_value(frame.out)
    if odd:
        return Difference(f"takes or returns a {odd}, which no guard can compare", frame.site.line)
    if has_gradient_hooks(tensor for tensor in frame.module.parameters() if type(tensor) is DTensor):
        # A region converts parameters where it begins, so backward comes to them in another order. Hooks communicate,
        # and whether there is a region is every rank's own finding.
        return Difference("has a hook on a parameter's gradient, which must run in the same order on all ranks", "")
    tape, reason = hoisted(frame, storages)
    reason = reason or forbidden(frame, tape)
    return reason or _tried(frame, tape, storages)


_HOOKING = frozenset({Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook})


class _SeesDTensors(TorchFunctionMode):
    """In a trial every tensor is plain but those that the forward has from elsewhere."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in _HOOKING:
            raise _Left(f"calls {function.__name__} on a tensor, whose gradient is to be seen as the whole's")
        if any(issubclass(kind, DTensor) for kind in types):
            raise _Left("uses a sharded tensor that is neither an input nor a parameter")
        return function(*args, **(kwargs or {}))


class _Trial:
    """The pass in which called modules answer with what they gave when they were recorded."""

    def __init__(self, tape: list, taping: Taping) -> None:
        self._given = iter([item for item in tape if type(item) is not Op])
        self._next = next(self._given, None)
        self._taping = taping
        self.met: list[tuple[Tensor, Tensor]] = []  # what modules and boundaries were given when recorded, and now

    def enter(self, site: Any, args: tuple, kwargs: dict) -> Any:
        item = self._next
        if type(item) is not Crossing or item.frame.site is not site:
            raise _Left(f"calls {site.name}, which it did not on shards")
        with local_only():
            inputs = refs_of((args, kwargs), self._taping.storages)
        self._taping.tapes[-1].append(Crossing(item.frame, inputs, item.line))
        self._next = next(self._given, None)
        self.met += zip(item.frame.inputs, tensors_of((args, kwargs)))
        given = dict(zip(map(id, item.frame.inputs), tensors_of((args, kwargs))))
        return map_tensors(item.frame.out, lambda tensor: given.get(id(tensor), tensor))  # it may hand back its input

    def at_boundary(self, converter: Any, tensor: Tensor) -> Tensor:
        item = self._next
        if type(item) is not Conversion or item.by is not converter:
            return tensor
        self.met.append((item.source, tensor))
        with local_only():
            source = self._taping.storages.ref(tensor)
        self._taping.tapes[-1].append(
            Conversion(
                tensor, item.before, item.result, item.after, item.cause, item.line, converter, (source, item.refs[1])
            )
        )
        self._next = next(self._given, None)
        return item.result


def _tried(frame: Frame, tape: list, storages: Storages) -> Difference | None:
    taping = Taping(storages)
    pairs = Pairs()
    follower = _Follower(frame, taping, Comparison(tape, pairs))
    taping.check = follower.look
    args, kwargs = _entering(frame)
    known = [*frame.inputs, *frame.module.parameters(), *frame.module.buffers(), *frame.conversions.values()]
    known += frame.sources.values()
    known += tensors_of(frame.out)
    for item in tape:
        if type(item) is Conversion:
            known += [item.source, item.result]
        elif type(item) is Crossing:
            known += [*item.frame.inputs, *tensors_of(item.frame.out)]
    done = tensors_of(frame.out)
    unwrapped = unwrap(known)
    swapped = [*_swap(frame), *_quiet_hooks(tape)]
    try:
        taping.tapes.append([])
        with ExitStack() as stack:
            trial = _Trial(tape, taping)
            stack.enter_context(entered(trial))
            stack.enter_context(_SeesDTensors())
            stack.enter_context(taping)
            if frame.state[1]:  # a checkpoint counts what is saved: not what a trial saves
                stack.enter_context(saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing))
            out = frame.site.forward(*args, **kwargs)
        difference = follower.rest() or _compare(frame, tape, taping, pairs, done, out, trial.met)
        del out
        trial.met.clear()
        made_here = _made_on(taping.tapes.pop())
        if difference is None and outlasts(lambda: storages.any_alive(made_here)):
            return Difference("keeps a tensor that it made beyond its call", frame.site.line)
        return difference
    except _Parted:
        return explained(follower.parted)
    except _Left as left:
        return follower.caught_up() or Difference(left.why, frame.site.line)
    except Exception as error:
        return follower.caught_up() or _raised(frame, error)
    finally:
        for owner, name, usual in swapped:
            owner[name] = usual
        wrap(unwrapped)


class _Follower:
    """Follows a trial on its tape, and ends it before an operator runs that the recorded pass did not run there.

    Only what ran on shards in that pass is safe to run on them: rows of a table that another rank holds are an
    IndexError on a CPU, and on a GPU the end of the process.
    """

    def __init__(self, frame: Frame, taping: Taping, comparison: Comparison) -> None:
        self._frame, self._taping, self._comparison = frame, taping, comparison
        self._seen = 0
        self._made: set[int] = set()  # storages that the trial's operators made
        self.parted: Difference | None = None

    def look(self, op: Op) -> None:
        """Before an operator of the trial runs."""
        self.parted = self._follow() or self._comparison.foreseen(op)
        if self.parted is not None:
            raise _Parted
        why = why_not(op, self._made, self._frame)
        if why:
            raise _Left(why)

    def _follow(self) -> Difference | None:
        """What has come on the trial's tape since."""
        tape, at = self._taping.tapes[-1], self._seen
        self._seen = len(tape)
        for item in tape[at:]:
            difference = self._comparison.add(item)
            if difference is not None:
                return difference
            if type(item) is Op:
                self._made |= set(storages_in(item.out)) - set(storages_in(item.args))
        return None

    def caught_up(self) -> Difference | None:
        """The first difference so far of a trial that was left."""
        difference = self._follow()
        return None if difference is None else explained(difference)

    def rest(self) -> Difference | None:
        """The first difference of a trial that came to its end."""
        difference = self._follow() or self._comparison.end()
        return None if difference is None else explained(difference)


def _made_on(tape: list) -> set[int]:
    """The storages that operators on a tape made, all other tensors on it let go."""
    ops = [item for item in tape if type(item) is Op]
    tape.clear()
    return {made for op in ops for made in set(storages_in(op.out)) - set(storages_in((op.args, op.kwargs)))}


def _entering(frame: Frame) -> tuple[tuple, dict]:
    """What the module takes, inputs that its boundary converts replaced by what they became."""
    replaced = {id(frame.inputs[at]): new for at, new in frame.conversions.items() if isinstance(at, int)}
    return map_tensors((frame.args, frame.kwargs), lambda tensor: replaced.get(id(tensor), tensor))


def _swap(frame: Frame) -> list[tuple[dict, str, Tensor]]:
    swapped = []
    for at, new in frame.conversions.items():
        if isinstance(at, str):
            owner, name = parameter_place(frame.module, at)
            swapped.append((owner, name, owner[name]))
            owner[name] = new
    return swapped


def _quiet_hooks(tape: list) -> list[tuple[dict, str, Any]]:
    """Takes all but a plan's boundaries off the modules that are called: in a trial they are not run again."""
    usual = []
    for module in {item.frame.module for item in tape if type(item) is Crossing}:
        held = module.__dict__
        for name, hooks in zip(FORWARD_HOOKS, (hooks_before(module), hooks_after(module))):
            usual.append((held, name, held[name]))
            held[name] = OrderedDict((hook.key, hook.call) for hook in hooks if hasattr(hook.call, "converter"))
    return usual


def _compare(
    frame: Frame,
    tape: list,
    taping: Taping,
    pairs: Pairs,
    done: list[Tensor],
    out: Any,
    met: list[tuple[Tensor, Tensor]],
) -> Difference | None:
    tried = tensors_of(out)
    if len(tried) != len(done) or odd_value(out) or _skeleton(out) != _skeleton(frame.out):
        return Difference("returns something else", frame.site.line)
    wanted = [frame.sources.get(i, tensor) for i, tensor in enumerate(done)]
    twice = copied(tape)
    with local_only():
        for one, other in zip(wanted, tried):
            if taping.storages.ref(one).storage in twice:
                return Difference("returns a view of a shard where one device has a copy", frame.site.line)
            if not pairs.same(taping.storages.ref(one), taping.storages.ref(other)):
                return Difference("returns another tensor", frame.site.line)
            if not same_bits(one, other):
                return Difference("gives other bits", frame.site.line)
        # Modules answer with what they gave, graph and all, so that gradients of what they took are looked at apart: a
        # boundary may convert an input whose gradient alone differs (R to I), and a module may have taken it as it was.
        taken = graph_difference([one for one, _ in met], [other for _, other in met], bool(twice), frame.moved)
        if taken is not None:
            what = f"calls a module with a value whose gradient would flow in another way ({taken.what})"
            return Difference(what, frame.site.line)
        return graph_difference(wanted, tried, bool(twice), frame.moved)


def _skeleton(value: Any) -> Any:
    """A result without its tensors."""
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, dict):
        return type(value), tuple((name, _skeleton(item)) for name, item in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_skeleton, value))
    return value


# --- words ---------------------------------------------------------------------------


def _raised(frame: Frame, error: Exception) -> Difference:
    """The reason of a trial that raised."""
    line = _line_of(error) or frame.site.line
    if isinstance(error, (RuntimeError, ValueError)):
        return Difference(f"reads a global size{_source(line)}; write -1 to make it static", line)
    why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return Difference(f"{why}{_source(line)}", line)


def _line_of(error: Exception) -> str:
    """The user's line that an exception came from."""
    found, at = "", error.__traceback__
    while at is not None:
        if is_users(at.tb_frame):
            found = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}"
        at = at.tb_next
    return found


def explained(difference: Difference) -> Difference:
    return Difference(f"{difference.what}{_source(difference.line)}", difference.line)


def _source(line: str) -> str:
    """The user's line itself, quoted."""
    path, _, number = line.rpartition(":")
    text = linecache.getline(path, int(number)).strip() if number.isdigit() else ""
    return f" in `{text}`" if text else ""
