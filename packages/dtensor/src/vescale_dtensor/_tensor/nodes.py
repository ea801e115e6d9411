"""`y.grad_fn` of a DTensor: autograd's node, whose hooks are given global gradients, or are refused.

A node runs below the engine, on shards. The gradient that arrives at it is that of the tensor that was asked for it, so
a prehook is handed a DTensor; what it hands on are gradients of operands, of whose layouts autograd knows nothing. A
node that accumulates names its parameter, and so the layout. torch's own code, and veScale's, gets the node itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.autograd.graph import Node

from vescale_trace.stack import frames, module_of

from .._conversions.convert import alias
from .._errors import GradientError
from .._layouts.layout import Layout
from .gradient import converted_gradient, layout_of_gradient
from .tensor import DTensor, attach, local_only

# Of what lies between the asking code and the answer, by name: torch hands a getter on, and modes may hear of it first.
_ON_THE_WAY = (
    "_asks_below", "node_of",
    "__torch_function__", "dispatch", "call_entry", "ordinary_call", "__get__", "__call__",
)  # fmt: skip
# Those of torch's modules that hand a node's hooks to users.
_FOR_USERS = ("torch.nn.modules.module",)

_known: WeakValueDictionary[tuple[int, int], GlobalNode] = WeakValueDictionary()


def node_of(function: Callable, args: tuple, kwargs: dict) -> Any:
    """`Tensor.grad_fn`."""
    tensor = args[0]
    with local_only():
        node = function(tensor)
        number = tensor.output_nr
    if node is None or _asks_below():
        return node
    return _global(node, number, layout_of_gradient(tensor))


def _asks_below() -> bool:
    """True if torch or the engine asks, who walk over nodes and compare them."""
    name = ""
    for frame in frames():
        if frame.f_code.co_name not in _ON_THE_WAY:
            name = module_of(frame)
            break
    top = name.partition(".")[0]
    return (top == "torch" or top.startswith("vescale")) and name not in _FOR_USERS


def _global(node: Any, number: int, layout: Layout | None) -> GlobalNode:
    known = _known.get((id(node), number))
    if known is None or known.below is not node:
        known = _known[id(node), number] = GlobalNode(node, number, layout)
    return known


def _accumulated(node: Any) -> Layout | None:
    variable = getattr(node, "variable", None)
    return layout_of_gradient(variable) if type(variable) is DTensor else None


class GlobalNode(Node):
    """A node of the graph, as code that uses DTensors sees it: `below` is autograd's own.

    layout: of the gradient with respect to the node's output `number`; None if it is not known.
    """

    def __init__(self, node: Any, number: int, layout: Layout | None) -> None:
        self.below, self.number, self.layout = node, number, layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def __eq__(self, other: object) -> bool:
        return self.below is (other.below if isinstance(other, GlobalNode) else other)

    def __hash__(self) -> int:
        return hash(self.below)

    def __repr__(self) -> str:
        return repr(self.below)

    def name(self) -> str:
        return self.below.name()

    @property
    def next_functions(self) -> tuple:
        """Nodes of operands: their layouts are known where they accumulate."""
        return tuple(
            (None if node is None else _global(node, number, _accumulated(node)), number)
            for node, number in self.below.next_functions
        )

    @property
    def metadata(self) -> dict:
        return self.below.metadata

    def _sequence_nr(self) -> int:
        return self.below._sequence_nr()

    @property
    def _input_metadata(self) -> list:
        return self.below._input_metadata

    def _register_hook_dict(self, tensor: Tensor) -> None:
        self.below._register_hook_dict(tensor)

    def register_prehook(self, fn: Callable) -> Any:
        """`fn(grad_outputs)`, of global gradients, and what it returns in their place."""
        layout = self._told("register_prehook")

        def prehook(gradients: tuple) -> tuple | None:
            answer = fn(_seen(gradients, layout))
            return None if answer is None else tuple(_below(one, layout) for one in answer)

        return self.below.register_prehook(prehook)

    def register_hook(self, fn: Callable) -> Any:
        """`fn(grad_inputs, grad_outputs)` where the node accumulates, and so has no inputs; else refused."""
        layout = self._told("register_hook")
        if self.below.next_functions:
            self._refuse("register_hook")
        return self.below.register_hook(lambda inputs, outputs: fn(inputs, _seen(outputs, layout)))

    def _told(self, operation: str) -> Layout:
        if self.layout is None or len(self._input_metadata) != 1:
            self._refuse(operation)
        return self.layout

    def _refuse(self, operation: str) -> None:
        raise GradientError(
            f"grad_fn.{operation}",
            f"{self.below.name()} computes on shards, and the layouts of the gradients that this hook would "
            "receive are not known",
            [] if self.layout is None else [f"gradient of its result  {self.layout!r}"],
            [
                ("y.register_hook(hook)", "receives the global gradient of a tensor, a result or an operand"),
                ("y.grad_fn.register_prehook(hook)", "the same, for a node with one result"),
                ("module.register_full_backward_hook(hook)", "receives those of a module's inputs and results"),
            ],
        )


def _seen(gradients: tuple, layout: Layout) -> tuple:
    return tuple(None if one is None else attach(alias(one), layout) for one in gradients)


def _below(gradient: Tensor | None, layout: Layout) -> Tensor | None:
    if gradient is None:
        return None
    return alias(converted_gradient(gradient, layout.gradient, "grad_fn.register_prehook"))
