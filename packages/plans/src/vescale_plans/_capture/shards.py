"""A captured graph on this rank's shards: one graph forward and one backward, for one set of layouts.

The graph of torch's functions is run once on DTensors, by the engine that runs eager code, while the operators below
are recorded (`make_fx`). Collectives and draws become operators in the order of eager code (`Effects`): nothing is sent
or drawn. torch's partitioner divides what autograd makes of it, and a backend compiles both parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import Effects, attach, close_scope, local_only, open_scope

from .._plan.parts import PlanError
from .._torch_private import HigherOrderOperator, backend_named, make_fx, partitioned, without_values
from .passage import reach_of
from .refusals import Refused
from .steps import Steps

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.view.default)
"""Operators that return what they are given, if its sizes stay: a graph without writes needs no other object."""
_STEP = (torch.ops.vescale.step, torch.ops.vescale.step.default)


class _OnShards(fx.Interpreter):
    """Runs a graph of the user's functions on DTensors, with a plan's steps where the graph has their operators."""

    def __init__(self, graph: fx.GraphModule, steps: Steps) -> None:
        super().__init__(graph)
        self._steps = steps
        self._entered: list[str] = []

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target not in _STEP:
            if isinstance(target, HigherOrderOperator):
                raise Refused(f"it calls {target.name()}, which has a graph of its own")
            return target(*args, **kwargs)
        given, what, name = args
        if what == "enter":
            self._entered.append(name)
        elif what == "leave" and (not self._entered or self._entered.pop() != name):
            raise Refused(f"{name} is called without a tensor")
        return self._steps.apply(given, what, name)


class Shards:
    """A captured graph on tensors of one set of layouts.

    Arguments:
        graph: of torch's functions, on global tensors.
        steps: of the modules whose forwards it has.
        cut: mesh axes that cut weights of the region (`open_scope`).
        given: what enters in the first call: DTensors, plain tensors, and numbers.
        backend: a compiler's, by name.

    Raises Refused for what cannot be a graph of shards.
    """

    def __init__(
        self, graph: fx.GraphModule, steps: Steps, cut: Collection[int], given: Sequence[Any], backend: str
    ) -> None:
        self._graph, self._steps, self._cut = graph, steps, cut
        tensors = [one for one in given if isinstance(one, Tensor)]
        self._numbers = [None if isinstance(one, Tensor) else one for one in given]
        self._layouts = [one._layout.tracked if type(one) is DTensor else None for one in tensors]
        self._trains = [torch.is_grad_enabled() and one.requires_grad for one in tensors]
        self._effects = Effects()
        with local_only():
            local = [one.detach() for one in tensors]
        states = _generator_states(local)
        try:
            with self._effects.capture():
                tangents = self._look(local)
                joint = self._traced(self._joint if self.trained else self._alone, local, tangents)
            _check_constants(joint)
            with torch.no_grad(), _casting_off():
                if self.trained:
                    forward, backward = partitioned(joint, len(self.results) + 1)
                    self._kept = _keep_apart(forward, backward, len(self.results) + 1)
                    self._forward, self._backward = _compiled(forward, backend), _compiled(backward, backend)
                else:
                    self._forward = _compiled(joint, backend)
        except Exception as error:  # whatever it is, an eager call raises it where it belongs
            raise error if isinstance(error, Refused) else Refused(_first_line(error)) from error
        finally:
            drawn = [(put, was) for put, ask, was in states if not torch.equal(ask(), was)]
            for put, was in drawn:
                put(was)
        if drawn:
            raise Refused("it draws random numbers for a plain tensor")

    # --- through the engine ----------------------------------------------------------------

    def _run(self, local: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
        """Returns what the graph is given, and what it gives: DTensors."""
        open_scope(self._cut)
        try:
            tensors = iter([one.view_as(one) if layout is None else attach(one.view_as(one), layout)
                            for one, layout in zip(local, self._layouts)])  # fmt: skip
            given = [next(tensors) if one is None else one for one in self._numbers]
            return given, list(_OnShards(self._graph, self._steps).run(*given))
        finally:
            close_scope()

    def _leaves(self, local: Sequence[Tensor]) -> list[Tensor]:
        return [one.detach().requires_grad_(trains) for one, trains in zip(local, self._trains)]

    def _look(self, local: Sequence[Tensor]) -> list[Tensor]:
        """Runs it once to see what comes out. Returns gradients of the results that have one: zeros."""
        leaves = self._leaves(local)
        given, out = self._run(leaves)
        inputs = {id(one): place for place, one in enumerate(given) if isinstance(one, Tensor)}
        memory = {one.untyped_storage()._cdata for one in local}
        self.places: list[int | None] = []  # of each result: the place of the input that it is, None for a new one
        self.results: list[Layout | None] = []  # of each new result
        made = []
        for one in out:
            if not isinstance(one, Tensor):
                raise Refused(f"its graph returns {one!r}")
            self.places.append(inputs.get(id(one)))
            if id(one) in inputs:
                continue
            self.results.append(one._layout.base if type(one) is DTensor else None)
            with local_only():
                if one.untyped_storage()._cdata in memory:
                    raise Refused("it returns a view of what it is given")
                made.append(one.view_as(one))
        self.trained = [place for place, one in enumerate(made) if one.requires_grad]
        self._reach = reach_of(leaves, made)
        self._effects.forget()
        return [torch.zeros_like(made[place]) for place in self.trained]

    def _traced(self, run: Callable, local: list[Tensor], tangents: list[Tensor]) -> fx.GraphModule:
        """Returns the operators of `run`, without writes in place, which a partition could tear apart."""

        def joint(primals: list[Tensor], tangents: list[Tensor]) -> Any:  # a partitioner goes by these names
            return run(primals, tangents)

        graph = make_fx(joint)(local, tangents)
        if any(node.op == "call_function" and node.is_impure() for node in graph.graph.nodes):
            run = torch.func.functionalize(graph)
            graph = make_fx(joint)(local, tangents)
        for node in graph.graph.nodes:
            if node.target in _SAME and node.args[0].meta["val"].shape == node.meta["val"].shape:
                node.replace_all_uses_with(node.args[0], lambda user: user.op != "output")  # results are apart
        return graph

    def _made(self, local: Sequence[Tensor]) -> list[Tensor]:
        made = [one for one, place in zip(self._run(local)[1], self.places) if place is None]
        with local_only():
            return [one.view_as(one) for one in made]

    def _alone(self, local: list[Tensor], tangents: list[Tensor]) -> list[Any]:
        with torch.no_grad():
            return [*self._made(local), self._effects.end_pass()]

    def _joint(self, primals: list[Tensor], tangents: list[Tensor]) -> list[Any]:
        leaves = self._leaves(primals)
        with torch.enable_grad():
            made = self._made(leaves)
        token = self._effects.end_pass()
        inputs = [one for one, trains in zip(leaves, self._trains) if trains]
        roots = [made[place] for place in self.trained]
        with _casting_off():
            gradients = torch.autograd.grad(roots, inputs, tangents, allow_unused=True)
        self._like = [(one.shape, one.stride()) for one in tangents]
        return [*(one.detach() for one in made), token, *gradients, self._effects.end_pass()]

    # --- a call ------------------------------------------------------------------------------

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the new results for these tensors: plain, this rank's."""
        with local_only():
            return _graph(self, *tensors) if self.trained else self.forward(tensors)[0]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Sequence[Tensor]]:
        """Returns the new results, and what their backward needs."""
        local = [one.detach() for one in tensors]
        with self._effects.done(), torch.no_grad(), _casting_off():
            out = self._forward(*local)
        computed = iter(out[len(self.results) + 1 :])
        saved = [next(computed) if place is None else local[place] for place in self._kept] if self.trained else []
        return tuple(out[: len(self.results)]), saved

    def backward(self, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients of what entered, None for what no result in use depends on."""
        if torch.is_grad_enabled():
            rule = "a block is compiled, and the gradient of a compiled graph has no gradient (create_graph=True)"
            raise PlanError("backward", rule, (), [('parallelize(..., mode="eager")', "gradients of any order")])
        model = next((one for one in gradients if one is not None), None)
        if model is None:
            return [None] * len(self._trains)
        used = frozenset().union(*(self._reach[place] for place, one in enumerate(gradients) if one is not None))
        tangents = [_laid_out(gradients[place], model, *like) for place, like in zip(self.trained, self._like)]
        with self._effects.done():
            found = iter(self._backward(*saved, *tangents))
        made = [next(found) if trains else None for trains in self._trains]
        return [one if place in used else None for place, one in enumerate(made)]


class _Graph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: Shards, *tensors: Tensor) -> tuple[Tensor, ...]:
        made, saved = shards.forward(tensors)
        ctx.shards = shards
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*(one for place, one in enumerate(made) if place not in shards.trained))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # a checkpoint computes them now, by forwards on DTensors
        with local_only():
            return None, *ctx.shards.backward(saved, gradients)


# What a class's own `apply` does in the end: once a model is parallelized, that decides on layouts.
_graph = super(torch.autograd.Function, _Graph).apply


def _laid_out(gradient: Tensor | None, model: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Returns a gradient as the graph was made for: zeros for none."""
    if gradient is not None and gradient.stride() == strides:
        return gradient
    made = model.new_empty_strided(shape, strides)
    return made.zero_() if gradient is None else made.copy_(gradient)


@contextlib.contextmanager
def _casting_off() -> Iterator[None]:
    """A block without `torch.autocast`: what it casts, the graph has cast, and its backward is no part of it."""
    with contextlib.ExitStack() as off:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                off.enter_context(torch.autocast(kind, enabled=False))
        yield


def _keep_apart(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> list[int | None]:
    """Takes inputs, and views of them, off what a forward gives to its backward, behind `count` results: their memory
    is there already, and the backward makes the views. Returns the place of the input that each is, None for what is
    computed."""
    inputs = {node: place for place, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    output = forward.graph.output_node()
    given = list(output.args[0])
    computed, places = given[:count], []
    taken = backward.graph.find_nodes(op="placeholder")
    begin = taken[-1].next
    for saved, one in zip(given[count:], taken):
        views, base = [], saved
        while getattr(base.target, "is_view", False):
            views.append(base)
            base = base.args[0]
        places.append(inputs.get(base))
        if base not in inputs:
            computed.append(saved)
            continue
        users, last, one.meta = list(one.users), one, base.meta
        with backward.graph.inserting_before(begin):
            for view in reversed(views):
                last = backward.graph.call_function(view.target, (last, *view.args[1:]), view.kwargs)
                last.meta = view.meta
        for user in users:
            user.replace_input_with(one, last)
    output.args = (tuple(computed),)
    for graph in (forward, backward):
        graph.recompile()
    return places


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _check_constants(graph: fx.GraphModule) -> None:
    """Raises Refused for a tensor that the engine took from elsewhere: it would stay what it is now."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and any("lift_fresh" not in str(user.target) for user in node.users):
            raise Refused("a value that it computes with comes from outside of its graph")


def _compiled(graph: fx.GraphModule, backend: str) -> Callable:
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    return backend_named(backend)(graph, without_values(examples))


def _generator_states(local: Sequence[Tensor]) -> list[tuple[Callable, Callable, Tensor]]:
    """Returns of each generator that the tensors' devices have how to set its state, how to ask for it, and what it is
    now."""
    modules = [torch.random] + [torch.get_device_module(one.device) for one in local[:1] if one.device.type != "cpu"]
    return [(one.set_rng_state, one.get_rng_state, one.get_rng_state()) for one in modules]
