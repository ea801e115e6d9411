"""One probing forward: contractions are stubs, what lies between them really runs, and a taint shows where it goes.

Idea: a tensor-parallel plan is a statement about what lies BETWEEN two contractions. If feature f of one contraction
can only reach some input features of the next (a neuron, a head), both can be split there. So every contraction with a
parameter is replaced by a stub that returns numbers of the right shape, whatever its input; a taint put into some
output features is looked for at the inputs of all other contractions, and goes no further, for no stub hands it on.
Weights are never read, so they may lie on the meta device, and a model of any size is probed.

Many tests share one forward: every batch row is the same sample with the same stub values, row 0 is untainted, and
each further row carries one test. NaN shows influence through everything that computes; a shift of finite size,
compared with row 0, shows the paths that NaN may skip (comparisons, integers).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_trace.values import map_tensors, tensors_in

from ..._apply.generators import note_generator
from ..._dry.higher_order import check_plain
from ..._torch_private import TorchDispatchMode
from .calls import Call, Key, Reached, Test
from .contractions import Form, read
from .operands import Operands

aten = torch.ops.aten

SELECTORS = {aten.topk.default, aten.argmax.default, aten.sort.default, aten.sort.stable}
REDUCTIONS = {
    aten.mean.dim,
    aten.mean.default,
    aten.var.correction,
    aten.var_mean.correction,
    aten.linalg_vector_norm.default,
}
NORMS = {
    name: getattr(aten, name).default
    for name in ("native_layer_norm", "_fused_rms_norm", "native_group_norm")
    if hasattr(aten, name)
}


class Enough(Exception):
    """All that was to be seen in a forward has been."""


class Probe(TorchDispatchMode):
    """Stubs every contraction of one forward.

    Arguments:
        batch: rows of the batch.
        seed: of the stubs' values.
        calls: what an earlier forward found; None for that first forward, in which row 1 of the batch is followed.
        tests: batch row -> its tests; `everywhere` are tests on all rows, of parameters too that are no
            contraction's.
        shift: taint by a finite shift instead of NaN.
        bridge: a mean, a variance or a norm over features hands no taint on.
        silent: calls that reach nothing; their stubs take no memory.
        until: the forward is left, by `Enough`, when these calls have been seen.
        values: what stubs gave in other forwards of the same model, to be given again, and added to.
    """

    supports_higher_order_operators = True  # and refuses them (`check_plain`)

    def __init__(
        self,
        operands: Operands,
        batch: int,
        *,
        seed: int = 0,
        calls: Mapping[Key, Call] | None = None,
        tests: Mapping[int, Sequence[Test]] | None = None,
        everywhere: Sequence[Test] = (),
        shift: bool = False,
        bridge: bool = False,
        silent: frozenset[Key] = frozenset(),
        until: frozenset[Key] | None = None,
        values: dict[tuple[int, ...], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.values = {} if values is None else values
        self.operands, self.batch, self.seed = operands, batch, seed
        self.known, self.shift, self.bridge, self.silent = calls, shift, bridge, silent
        self.calls: dict[Key, Call] = {}
        self.reached = Reached(selectors=torch.zeros(batch, dtype=torch.bool))
        self.chosen: dict[int, int] = {}
        self.leading: dict[Key, torch.Size] = {}
        self.path: list[str] = []
        self._last: Call | None = None
        endless = until is None or any(calls[key].repeated for key in until)
        self._awaited = None if endless else set(until)
        self._tests: dict[Key, list[tuple[int, Test]]] = defaultdict(list)
        for row, together in (tests or {}).items():
            for test in together:
                self._tests[test.key].append((row, test))
        self._everywhere = {test.key: test for test in everywhere}
        operands.tainted = {key[0]: test.features for key, test in self._everywhere.items() if key not in (calls or ())}
        self._counts: dict[str, int] = defaultdict(int)
        self._order = 0

    @property
    def end(self) -> Key | None:
        """The last contraction, if nothing is selected after it: it reaches no other. None for a stack."""
        return None if self._last is None or self._last.stack else self._last.key

    # ------------------------------------------------------------------ dispatch

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        check_plain("generate_plan", function)
        kwargs = dict(kwargs or {})
        note_generator(kwargs)
        tensors = tensors_in((args, kwargs))
        metas = [one for one in tensors if one.is_meta]
        if not metas:
            return self._real(function, args, kwargs)
        form = read(self.operands, function, args, kwargs)
        if form is not None:
            return self._contract(form, function is aten.convolution.default)
        if len(metas) == len(tensors) and not _makes_values(function):
            return self._derived(function, args, kwargs, metas)
        if function is aten.index.Tensor and metas[0] is args[0] and len(args[1]) == 1 and args[0].ndim > 2:
            return self._chosen(args[0], args[1][0])
        args, kwargs = map_tensors((args, kwargs), lambda one: self.operands.value(one) if one.is_meta else one)
        return self._real(function, args, kwargs)

    def _real(self, function, args, kwargs):
        if (device := kwargs.get("device")) is not None and torch.device(device).type == "meta":
            kwargs["device"] = torch.device("cpu")
        if function in SELECTORS:
            self._last = None
            self._select(args[0])
            if function is aten.topk.default and args[0].ndim:
                self.chosen[args[0].shape[-1]] = max(args[1], self.chosen.get(args[0].shape[-1], 0))
        if self.bridge and function in REDUCTIONS and args[0].is_floating_point():
            args = (args[0].nan_to_num(0.0), *args[1:])
        if self.bridge and function in NORMS.values():
            clean = function(args[0].nan_to_num(0.0), *args[1:], **kwargs)
            first = clean[0].masked_fill(args[0].isnan().reshape(clean[0].shape), float("nan"))
            return (first, *clean[1:])
        return function(*args, **kwargs)

    def _derived(self, function, args, kwargs, metas):
        """Parameters alone go in: what comes out stands for a parameter too."""
        if (device := kwargs.get("device")) is not None and torch.device(device).type != "meta":
            kwargs["device"] = torch.device("meta")
        made = function(*args, **kwargs)
        for one in tensors_in(made):
            self.operands.derive(one, metas)
        return made

    def _chosen(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Entries of a stack, one per routed row."""
        made = torch.empty((*rows.shape, *weight.shape[1:]), dtype=weight.dtype, device="meta")
        if rows.ndim == 1:
            self.operands.derive_rows(made, weight)
        return made

    def _select(self, scores: Tensor) -> None:
        if scores.is_floating_point() and scores.numel() and scores.numel() % self.batch == 0:
            self.reached.selectors |= scores.reshape(self.batch, -1).isnan().any(1)

    # -------------------------------------------------------------- contractions

    def _contract(self, form: Form, convolution: bool) -> Tensor:
        call = self._last = self._call(form, convolution)
        rows = prod(form.out_shape) // max(1, call.out_features)
        tagged = None
        if form.x is not None:
            self.leading[call.key] = form.x.shape[:-1]
        if self.known is None:
            tagged = self._follow(call, form, rows)
        elif form.x is not None and form.x.is_floating_point():
            self._look(call, form.x)
            if self._awaited is not None:
                self._awaited.discard(call.key)
                if not self._awaited:
                    raise Enough
        if call.key in self.silent:
            return torch.zeros((), dtype=_float(form)).expand(form.out_shape)
        moved = self._stub(call, form, rows)
        if tagged is not None:
            moved[tagged] = float("nan")
        self._taint(call, moved)
        shape = list(form.out_shape)
        feature = form.feature % len(shape)
        features = shape.pop(feature)
        return moved.view(*shape, features).movedim(-1, feature).contiguous()

    def _call(self, form: Form, convolution: bool) -> Call:
        name = self.operands.name(form.weight)
        whole = prod(self.operands.shapes[name])
        out_features = form.weight.shape[form.out_dim]
        in_features = 0 if form.in_dim is None else form.weight.shape[form.in_dim]
        stack = not convolution and len(self.operands.shapes[name]) > 2 and in_features * out_features < whole
        key = (name, 0 if stack else self._counts[name])
        self._counts[name] += 1
        if (call := self.calls.get(key)) is not None:
            call.repeated = True
        else:
            call = self.calls[key] = (self.known or {}).get(key) or Call(
                key,
                self._order,
                in_features,
                out_features,
                form.in_dim is None,
                form.scattered,
                stack,
                convolution,
                None if form.in_dim is None else self.operands.features(form.weight, form.in_dim),
                self.operands.features(form.weight, form.out_dim),
                self._bias(form, name),
                tuple(self.path),
            )
        self._order += 1
        return call

    def _bias(self, form: Form, name: str) -> str | None:
        """The parameter that is added to this product, by the operator or by the linear layer that runs."""
        if form.bias is not None:
            return self.operands.name(form.bias) if form.bias.is_meta else None
        own = self.path and name == f"{self.path[-1]}.weight"
        return self.operands.biases.get(name) if own else None

    def _layout(self, call: Call, rows: int) -> tuple[int, int] | None:
        """(outer, inner): the rows are [outer, batch, inner]."""
        if call.outer is None or rows % (call.outer * self.batch):
            return None
        return call.outer, rows // (call.outer * self.batch)

    def _stub(self, call: Call, form: Form, rows: int) -> Tensor:
        """[rows, out features], the same for all rows of the batch."""
        features, dtype = call.out_features, _float(form)
        layout = self._layout(call, rows)
        if layout is None:  # whatever row is whose: all are alike
            return self._random(1, features).to(dtype).repeat(rows, 1)
        outer, inner = layout
        one = self._random(outer, 1, inner, features).to(dtype)
        return one.repeat(1, self.batch, 1, 1).view(rows, features)

    def _random(self, *shape: int) -> Tensor:
        key = (self.seed, self._order, *shape)
        if key not in self.values:
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + 7919 * self._order + 11)
            self.values[key] = torch.randn(*shape, generator=generator)
        return self.values[key]

    def _taint(self, call: Call, out: Tensor) -> None:
        if (test := self._everywhere.get(call.key)) is not None:
            out[:, test.features] = float("nan")
        layout = self._layout(call, out.shape[0])
        if layout is None:
            return
        parts = out.view(layout[0], self.batch, layout[1], -1)
        for row, test in self._tests.get(call.key, ()):
            if test.token is not None:
                if layout[1] > test.token:
                    parts[:, row, test.token] = float("nan")
                elif layout[1] == 1 and layout[0] > test.token:  # positions outside the batch
                    parts[test.token, row] = float("nan")
            elif self.shift:
                sign = torch.where(parts[:, row][..., test.features] >= 0, 1.0, -1.0).to(parts.dtype)
                sizes = 3.0 + torch.arange(len(test.features), dtype=parts.dtype)  # no two add up to nothing
                parts[:, row, :, test.features] += sign * sizes
            else:
                parts[:, row, :, test.features] = float("nan")

    def _look(self, call: Call, x: Tensor) -> None:
        """Notes which features, of which rows of the batch, are tainted."""
        key, features = call.key, x.shape[-1]
        flat = x.reshape(-1, features)
        layout = self._layout(call, flat.shape[0])
        if layout is None:
            if self._tests:
                return  # whose taint it is cannot be told
            found = flat.isnan().any(0).expand(self.batch, features)
        else:
            found, tokens = self._hits(flat.view(layout[0], self.batch, layout[1], features))
            seen = self.reached.tokens.get(key)
            if seen is None or seen.shape == tokens.shape:
                self.reached.tokens[key] = tokens if seen is None else seen | tokens
        seen = self.reached.features.get(key)
        self.reached.features[key] = found if seen is None else seen | found

    def _hits(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tainted part of an input [outer, batch, inner, features]: bool [batch, features], [batch,
        positions]."""
        outer, batch, inner, features = parts.shape
        if self.shift:
            base = parts[:, :1]
            hit = (parts - base).abs() > 1e-3 * (base.abs() + 1e-2)
        elif bool(parts.sum().isnan()):
            hit = parts.isnan()
        else:  # one pass tells that no taint arrived, as is so for most
            none = torch.zeros(batch, 1, dtype=torch.bool)
            return none.expand(batch, features), none.expand(batch, inner if inner > 1 else outer)
        return hit.any(2).any(0), hit.any(3).any(0) if inner > 1 else hit.any(3).any(2).t()

    def _follow(self, call: Call, form: Form, rows: int) -> Tensor | None:
        """Finds, in the first forward, the rows of the result that belong to row 1 of the batch, and the layout they
        show."""
        if form.x is not None:
            tagged = form.x.reshape(-1, form.x.shape[-1]).isnan().any(1)
        else:
            tagged = _differing(form.rows, self.batch)
        if tagged is None or not bool(tagged.any()):
            call.untouched = form.x is not None and not (call.stack or form.scattered)
            return None
        if call.stack or form.scattered:
            return tagged if tagged.numel() == rows else None
        if bool(tagged.all()):
            call.coupled = rows % self.batch == 0 and rows > self.batch
            return tagged if tagged.numel() == rows else torch.ones(rows, dtype=torch.bool)
        call.outer = _outer(tagged, self.batch)
        if tagged.numel() == rows:
            return tagged
        if self._layout(call, rows) is None:
            return None
        made = torch.zeros(call.outer, self.batch, rows // (call.outer * self.batch), dtype=torch.bool)
        made[:, 1] = True  # a convolution with strides gives fewer places than it takes
        return made.flatten()


def _outer(tagged: Tensor, batch: int) -> int | None:
    """Returns how many times the pattern [batch, inner], with row 1 tagged, is repeated."""
    rows = tagged.numel()
    if rows % batch:
        return None
    for outer in range(1, rows // batch + 1):
        if (rows // batch) % outer == 0:
            parts = tagged.view(outer, batch, -1)
            if bool(parts[:, 1].all()) and not bool(parts[:, 0].any()) and not bool(parts[:, 2:].any()):
                return outer
    return None


def _differing(rows: Tensor, batch: int) -> Tensor | None:
    """Looked-up integers of which row 1 of the batch is not as the others: bool [rows]."""
    for dim, size in enumerate(rows.shape):
        if size == batch and batch > 2:
            parts = rows.movedim(dim, 0)
            if torch.equal(parts[0], parts[2]) and not torch.equal(parts[0], parts[1]):
                tagged = torch.zeros(rows.shape, dtype=torch.bool)
                tagged.movedim(dim, 0)[1] = True
                return tagged.reshape(-1)
    return None


def _float(form: Form) -> torch.dtype:
    dtype = form.weight.dtype if form.x is None else form.x.dtype
    return dtype if dtype.is_floating_point else torch.float32


def _makes_values(function: Any) -> bool:
    """A call that needs no more of a parameter than its shape, or that reads a value."""
    name = function.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_") or name in ("_local_scalar_dense", "equal", "is_nonzero")
