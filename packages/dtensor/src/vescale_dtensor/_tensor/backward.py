"""Backwards that start at DTensors: their roots and seeds, who is told of their beginning and of their end.

The graph itself runs on plain tensors (design section 2).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .._conversions.convert import alias, convert, convert_plain, describe
from .._errors import GradientError
from .._layouts.layout import Layout, layout_of
from .._layouts.mesh import Mesh
from .._layouts.state import INVARIANT, REPLICATE
from .._torch_private import (
    _current_autograd_node,
    _current_graph_task_id,
    _is_torch_function_enabled,
    _len_torch_dispatch_stack,
    _make_grads,
    replace_make_grads,
)
from .gradient import as_gradient_of, layout_of_gradient
from .stand_in import parameter_of
from .tensor import DTensor, attach, local_only, plain_class, source_of, watch_autograd

# What is called at the end of the backward that runs, in the order of its coming.
_after_backward: list[Callable[[], None]] = []
_backwards = 0  # that started at a DTensor, within none
_depth = 0
_keeps = False  # whether the graph of the backward that runs outlasts it
_before_backward: list[weakref.WeakMethod] = []


def after_backward(call: Callable[[], None]) -> None:
    """Calls `call` at the end of the backward that runs, where that started at a DTensor, and not where it fails: what
    is left of one that failed belongs to whoever goes on with the same model, and to nobody else's backward."""
    _after_backward.append(call)


def before_backward(call: Callable[[Sequence[Node]], None]) -> None:
    """Calls a method with the nodes that a backward starts from before it runs, as long as its object lives: of one
    that starts at DTensors, or else at each node where plain tensors were made of them (`told_of_plain`)."""
    _before_backward[:] = [one for one in _before_backward if one() is not None]
    _before_backward.append(weakref.WeakMethod(call))


def told_of_plain(plain: Tensor) -> Tensor:
    """A plain tensor made of a DTensor: a backward that comes from it may have started at plain tensors, and unseen."""
    if _before_backward and plain.grad_fn is not None:
        plain.grad_fn.register_prehook(_came_from_plain)
    return plain


def _came_from_plain(gradients: tuple[Tensor | None, ...]) -> None:
    if not _depth:
        _tell([_current_autograd_node()])


def _tell(nodes: Sequence[Node]) -> None:
    for held in _before_backward:
        call = held()
        if call is not None:
            call(nodes)


def _starting_at(roots: Sequence[Tensor]) -> None:
    """An outermost backward begins."""
    if _before_backward and not _depth and _current_graph_task_id() == -1:
        with local_only():
            nodes = [root.grad_fn for root in roots]
        _tell([node for node in nodes if node is not None])


def backwards() -> int:
    """The number of the backward that started at a DTensor last."""
    return _backwards


def in_backward() -> bool:
    """True if a backward that started at a DTensor is running: `after_backward` will be called."""
    return _depth > 0


def keeps_graph() -> bool:
    """True if the backward that runs, if it started at a DTensor, was asked to keep its graph for another."""
    return _keeps


def root_of(tensor: Tensor, operation: str) -> Tensor:
    """Returns the tensor that backward starts from: a plain one, so that dispatch stays on while the graph runs.

    A replicated loss (R) becomes I first: otherwise every rank would count it.
    """
    if type(tensor) is not DTensor:
        return tensor
    layout = tensor._layout.base
    states = tuple(INVARIANT if state is REPLICATE else state for state in layout.states)
    return alias(convert(tensor, layout.with_states(states), operation))


def seed_of(tensor: Tensor | None, gradient: Tensor | None, operation: str) -> Tensor | None:
    """The plain local seed for `root_of(tensor)`: of a plain root the whole gradient."""
    if type(tensor) is not DTensor:
        return gradient.full_tensor() if type(gradient) is DTensor else gradient
    layout = tensor._layout.base
    if gradient is None:
        with local_only():
            return torch.ones_like(tensor) if layout.numel == 1 and tensor.numel() == 1 else None
    states = tuple(INVARIANT if state is REPLICATE else state for state in layout.states)
    target = layout.with_states(states).gradient
    if tuple(gradient.shape) != layout.shape:
        as_gradient_of(tensor, gradient, operation)  # raises, with the numbers
    if type(gradient) is DTensor:
        return alias(convert(gradient, target, operation))
    return alias(convert_plain(gradient, layout.mesh, target, operation))


def _gathered_grads(outputs: Sequence[Any], gradients: Sequence[Tensor | None], is_grads_batched: bool) -> tuple:
    """torch's look at the seeds of a backward, of which nobody hears where all roots and inputs are plain."""
    if _is_torch_function_enabled() and DTensor in map(type, gradients):
        gradients = tuple(seed_of(None, one, "backward") for one in gradients)
    return _make_grads(outputs, gradients, is_grads_batched)


replace_make_grads(_gathered_grads)


def _started(tensors, seeds, operation: str) -> tuple[list[Tensor], list[Tensor | None]]:
    """Plain roots and local seeds.

    Inside a running backward a plain seed is a local gradient, as a reentrant
    checkpoint hands it on: it belongs to the tensor as it is. In that of a user's Function it is whole.
    """
    node = _current_autograd_node() if _current_graph_task_id() != -1 else None
    nested = node is not None and not hasattr(getattr(node, "_forward_cls", None), "_vescale_apply")
    roots, starts = [], []
    for tensor, seed in zip(tensors, seeds):
        own = nested and type(tensor) is DTensor and type(seed) is Tensor
        with torch.enable_grad():  # a root made without would have no graph, and a backward runs without
            roots.append(alias(tensor) if own else root_of(tensor, operation))
        starts.append(seed if own else seed_of(tensor, seed, operation))
    _check_scalar(tensors, starts, operation)
    return roots, starts


def start_backward(
    tensor: DTensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`DTensor.backward`, as `Tensor.backward`; a `gradient` is converted to the tensor's gradient layout.

    A loss of one element that is I or P starts as it is: it is its own plain root. For
    the time of the backward it is a plain tensor, so that autograd takes it without
    dispatch and without an alias node.
    """
    layout = tensor._layout
    if gradient is not None or inputs is not None or layout.shape or REPLICATE in layout.states:
        seeds = None if gradient is None else [gradient]
        return _run_backward([tensor], seeds, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
    source = source_of(tensor) if layout.is_number else None
    if source is not None:
        _engine_backward([source], [None], retain_graph=retain_graph, create_graph=create_graph)
        return _finish_backward()
    tensor.__class__ = plain_class(tensor)
    try:
        _engine_backward([tensor], [None], retain_graph=retain_graph, create_graph=create_graph)
    finally:
        tensor.__class__ = DTensor
    _finish_backward()


def backward(function: Any, args: tuple, kwargs: dict) -> None:
    """`Tensor.backward` and `torch.autograd.backward`."""
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
    if function is Tensor.backward:
        names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args))
    given.update({{"self": "tensors", "gradient": "grad_tensors"}.get(k, k): v for k, v in kwargs.items()})
    tensors, seeds = given.pop("tensors"), given.pop("grad_tensors", None)
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    _run_backward(tensors, [seeds] if isinstance(seeds, Tensor) else seeds, **given)


def _run_backward(tensors: list[Tensor], seeds: list | None, **options: Any) -> None:
    seeds = [None] * len(tensors) if seeds is None else list(seeds)
    roots, starts = _started(tensors, seeds, "backward")
    inputs = options.get("inputs")
    if inputs is not None:
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        with local_only():
            for tensor in inputs:
                if type(tensor) is DTensor and not tensor.is_leaf:
                    tensor.retain_grad()
        options["inputs"] = _edges(inputs)
    _engine_backward(roots, starts, **options)
    _finish_backward()


def _engine_backward(roots: list[Tensor], starts: list[Tensor | None], **options: Any) -> None:
    global _backwards, _depth, _keeps
    _starting_at(roots)
    if _len_torch_dispatch_stack():
        watch_autograd()
    before, _keeps = _keeps, _asked_to_keep(options)
    if not _depth:
        _backwards += 1
        _after_backward.clear()
    _depth += 1
    try:
        torch.autograd.backward(roots, starts, **options)
    except BaseException:
        _keeps = before
        raise
    finally:
        _depth -= 1
    if _depth:  # of the outermost, those who wait for its end still ask
        _keeps = before


def _asked_to_keep(options: dict[str, Any]) -> bool:
    kept = options.get("retain_graph")
    return bool(options.get("create_graph") if kept is None else kept)


def _finish_backward() -> None:
    """Tells those who wait for the end of the outermost backward."""
    global _keeps
    if not _depth:
        waiting = tuple(_after_backward)
        _after_backward.clear()
        for call in waiting:
            call()
        _keeps = False


def grad(function: Any, args: tuple, kwargs: dict) -> tuple[Tensor | None, ...] | dict[str, Tensor | None]:
    """`torch.autograd.grad`: gradients come back as DTensors in their layouts.

    Batched cotangents are taken one after the other, one backward each: vmap does not know of shards.
    """
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    given = dict(zip((*names, "is_grads_batched", "materialize_grads"), args)) | kwargs
    outputs, inputs, seeds = given.pop("outputs"), given.pop("inputs"), given.pop("grad_outputs", None)
    if isinstance(inputs, dict):
        return dict(zip(inputs, grad(function, (outputs, tuple(inputs.values()), seeds), given)))
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    inputs = tuple(parameter_of(one) for one in inputs)
    seeds = (None,) * len(outputs) if seeds is None else (seeds,) if isinstance(seeds, Tensor) else tuple(seeds)
    if given.pop("is_grads_batched", False):
        rows = zip(*[seed.unbind(0) for seed in seeds], strict=True)
        found = [grad(function, (outputs, inputs, row), given | {"retain_graph": True}) for row in rows]
        return tuple(None if one[0] is None else torch.stack(one) for one in zip(*found))
    if given.pop("materialize_grads", False):
        found = grad(function, (outputs, inputs, seeds), given | {"allow_unused": True})
        return tuple(torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found))
    roots, starts = _started(outputs, seeds, "autograd.grad")
    known = [_layout_behind(i) for i in inputs]
    # Inputs stay the DTensor objects (autograd knows the nodes by them), dispatch off only for the outer call's
    # own check: the graph itself runs on plain tensors.
    found = _engine_grad(roots, inputs, starts, given)
    mesh = next((output._layout.mesh for output in outputs if type(output) is DTensor), None)
    return tuple(_gradient(layout, g, mesh) for layout, g in zip(known, found))


def _layout_behind(source: Any) -> Layout | None:
    """Returns the layout of an input's gradient, None for a plain input. An edge of the graph names it where it leads
    to a leaf, or to a node that was asked of a DTensor."""
    if isinstance(source, GradientEdge):
        node = source.node
        variable = getattr(node, "variable", None)  # of a node that accumulates
        if variable is not None:
            return _layout_behind(variable)
        layout = getattr(node, "layout", None)
        if layout is None or node.number != source.output_nr:
            raise GradientError(
                "autograd.grad",
                f"an edge to {node.name()} does not say how its gradient is laid out on the mesh",
                [],
                [("torch.autograd.grad(outputs, tensor)", "for the tensor itself, whose layout is known")],
            )
        return layout
    return layout_of_gradient(source) if type(source) is DTensor else None


def _gradient(layout: Layout | None, found: Tensor | None, mesh: Mesh | None) -> Tensor | None:
    """Returns a graph's gradient of an input as another object: it can be the caller's own seed.

    That of a plain input is alike on all ranks, as the input is, and a DTensor (I) where it has a graph itself.
    """
    if found is None:
        return None
    if layout is not None:
        return attach(alias(found), layout)
    if type(found) is not Tensor or found.grad_fn is None or mesh is None:
        return found
    return attach(alias(found), layout_of(mesh, (INVARIANT,) * mesh.ndim, tuple(found.shape)))


def _engine_grad(roots, inputs, starts, options):
    """autograd.grad with inputs that are DTensors: they are named by their edges, which are not tensors."""
    global _keeps
    _starting_at(roots)
    before, _keeps = _keeps, _asked_to_keep(options)
    try:
        return torch.autograd.grad(roots, _edges(inputs), starts, **options)
    finally:
        _keeps = before


def _edges(tensors) -> list:
    """DTensors as their gradient edges, which torch's own backward does not hand to `__torch_function__`."""
    with local_only():
        return [torch.autograd.graph.get_gradient_edge(t) if type(t) is DTensor else _bare(t) for t in tensors]


def _bare(tensor: Any) -> Any:
    """An edge of a node as users see it (`nodes.py`) with autograd's own."""
    below = getattr(tensor.node, "below", None) if isinstance(tensor, GradientEdge) else None
    return tensor if below is None else GradientEdge(below, tensor.output_nr)


def _check_scalar(tensors, starts, operation: str) -> None:
    for tensor, start in zip(tensors, starts):
        if type(tensor) is DTensor and start is None:
            raise GradientError(
                operation,
                f"grad can be created only for a tensor of one element, not of shape {list(tensor.shape)}",
                [describe("tensor", tensor, tensor._layout)],
                [("reduce it first: tensor.sum()", ""), ("pass gradient=", "")],
            )
