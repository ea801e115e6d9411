"""Random programs: a few functions on a few tensors under random layouts, against one device. For tests.

    program = random_program(seed)      # in one process; the same for the same seed
    print(program)                      # as text, to read
    run_ranks(4, failure_of, program)   # None, or the first difference, per rank

A program is data: leaves (shape, kind, layout) and steps (the name of a function in
`program_functions.RUN`, what it takes, its static arguments). It is valid by construction, because
every step ran on one device when it was drawn, and well-conditioned: a step whose
result is huge or not finite, or that has a kink (relu, amax, a comparison) near one of
its values, is not taken, so that a difference is an error and not rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor
from vescale_dtensor.placement import InterleavedShard, Partial, Placement, Replicate, Shard

from ..oracle import spread
from .program_functions import KINKED, RUN
from .program_steps import PROPOSALS

MESHES = ((2, 2), (4,))
MOST_ELEMENTS, LARGEST = 2500, 1e4
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bool": torch.bool}  # all else: an index below a number


@dataclass(frozen=True)
class Leaf:
    """A tensor that the program starts from. kind: a key of DTYPES, or i<number>: indices below it."""

    shape: tuple[int, ...]
    kind: str
    grad: bool
    placements: tuple[Placement, ...] | None  # None: it stays a plain tensor
    seed: int

    def tensor(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if self.kind in ("f64", "f32"):
            value = torch.randn(self.shape, generator=generator, dtype=torch.float64)
            return value.to(DTYPES[self.kind]).requires_grad_(self.grad)
        if self.kind == "bool":
            return torch.rand(self.shape, generator=generator) < 0.5
        return torch.randint(max(1, int(self.kind[1:])), self.shape, generator=generator)

    def __str__(self) -> str:
        where = "plain" if self.placements is None else ", ".join(map(_short, self.placements))
        return f"{self.kind}{list(self.shape)}{' grad' if self.grad else ''}  {where}  (seed {self.seed})"


@dataclass(frozen=True)
class Step:
    """One call. An input is the number of an earlier step, or ~number of a leaf."""

    name: str
    inputs: tuple[int, ...]
    params: dict[str, Any]

    def run(self, leaves: list, values: list) -> Any:
        return RUN[self.name](*[values[i] if i >= 0 else leaves[~i] for i in self.inputs], **self.params)

    def __str__(self) -> str:
        inputs = [f"v{i}" if i >= 0 else f"l{~i}" for i in self.inputs]
        return f"{self.name}({', '.join(inputs + [f'{name}={value!r}' for name, value in self.params.items()])})"


@dataclass(frozen=True)
class Program:
    seed: int
    sizes: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [f"program {self.seed} on a mesh of {self.sizes}"]
        lines += [f"  l{i} = {leaf}" for i, leaf in enumerate(self.leaves)]
        lines += [f"  v{i} = {step}" for i, step in enumerate(self.steps)]
        return "\n".join(lines)

    @property
    def tolerance(self) -> float:
        single = any(s.name == "float" for s in self.steps) or any(leaf.kind == "f32" for leaf in self.leaves)
        return 2e-3 if single else 1e-7

    def on_one_device(self) -> tuple[list[Tensor], list[Tensor]]:
        """(leaves, values) with the leaves' gradients."""
        leaves = [leaf.tensor() for leaf in self.leaves]
        values: list[Tensor] = []
        for step in self.steps:
            values.append(step.run(leaves, values))
        _backward(values, values)
        return leaves, values

    def failure(self, mesh: DeviceMesh) -> str | None:
        """The first difference to one device, as text. On every rank; what it raises is the caller's."""
        wanted_leaves, wanted = self.on_one_device()
        leaves = []
        for leaf, tensor in zip(self.leaves, wanted_leaves):
            fresh = tensor.detach().clone().requires_grad_(leaf.grad)
            leaves.append(fresh if leaf.placements is None else spread(fresh, mesh, leaf.placements, seed=leaf.seed))
        values: list[Any] = []
        for number, step in enumerate(self.steps):
            values.append(step.run(leaves, values))
            wrong = _difference(values[-1], wanted[number], self.tolerance)
            if wrong:
                return f"v{number} {step.name}: {wrong}"
        _backward(wanted, values)
        for i, (leaf, want, have) in enumerate(zip(self.leaves, wanted_leaves, leaves)):
            if leaf.grad:
                if (want.grad is None) != (have.grad is None):
                    return f"gradient of l{i}: {'missing' if have.grad is None else 'not expected'}"
                wrong = None if want.grad is None else _difference(have.grad, want.grad, self.tolerance)
                if wrong:
                    return f"gradient of l{i}: {wrong}"
        return None


def random_program(seed: int) -> Program:
    """A program of 3 to 10 steps; its mesh is one of MESHES."""
    rng = random.Random(seed)
    while True:
        draw = Draw(rng, MESHES[seed % len(MESHES)])
        steps = rng.randint(3, 10)
        for _ in range(60):
            if len(draw.steps) == steps:
                break
            draw.step(rng.choice(PROPOSALS))
        program = Program(seed, draw.sizes, tuple(draw.leaves), tuple(draw.steps))
        leaves, _ = program.on_one_device()
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        if len(draw.steps) >= 3 and all(_tame(g) for g in gradients):
            return program


class Draw:
    """A program being drawn, with its values on one device. What a proposal asks."""

    def __init__(self, rng: random.Random, sizes: tuple[int, ...]) -> None:
        self.rng, self.sizes = rng, sizes
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.leaf_values: list[Tensor] = []
        self.values: list[Tensor] = []

    def step(self, propose: Callable) -> None:
        """One more step by a proposal, unless it does not fit."""
        known = len(self.leaves)
        asked = propose(self)
        if asked is not None:
            step = Step(*asked)
            try:
                with torch.no_grad():
                    value = step.run(self.leaf_values, self.values)
            except (RuntimeError, IndexError, ValueError, TypeError):
                value = None
            if value is not None and _tame(value) and (step.name not in KINKED or self._far_from_kinks(step)):
                self.steps.append(step)
                self.values.append(value)
                return
        del self.leaves[known:], self.leaf_values[known:]

    def value(self, ref: int) -> Tensor:
        return self.values[ref] if ref >= 0 else self.leaf_values[~ref]

    def shape(self, ref: int) -> tuple[int, ...]:
        return tuple(self.value(ref).shape)

    def kind(self, ref: int) -> str:
        return {torch.float64: "f64", torch.float32: "f32"}[self.value(ref).dtype]

    def size(self) -> int:
        return 0 if self.rng.random() < 0.03 else self.rng.choice((1, 2, 3, 4, 4, 5, 6, 7))

    def floating(self, least: int = 0, most: int = 5) -> int:
        """A value of `least` to `most` dims; the last one more often than not, a new leaf now and then."""
        fit = [r for r in self._refs() if self.value(r).is_floating_point() and least <= self.value(r).ndim <= most]
        if not fit or self.rng.random() < 0.15:
            ndim = self.rng.randint(max(least, min(1, most)), min(4, max(most, least)))
            return self.leaf([self.size() for _ in range(ndim)])
        return fit[-1] if self.rng.random() < 0.6 else self.rng.choice(fit)

    def mask(self, shape: tuple[int, ...]) -> int:
        """A bool value that broadcasts to a shape."""
        fit = [r for r in self._refs() if self.value(r).dtype is torch.bool and _broadcasts(self.shape(r), shape)]
        return self.rng.choice(fit) if fit and self.rng.random() < 0.8 else self.leaf(self.broadcast(shape), "bool")

    def broadcast(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to `shape`."""
        kept = shape[self.rng.choice((0, 0, 0, 1, 2)) :]
        return tuple(1 if self.rng.random() < 0.15 else size for size in kept)

    def partner(self, ref: int) -> int:
        """A floating value that broadcasts to another."""
        shape = self.shape(ref)
        fit = [r for r in self._refs() if self.value(r).is_floating_point() and _broadcasts(self.shape(r), shape)]
        if fit and self.rng.random() < 0.5:
            return self.rng.choice(fit)
        return self.leaf(self.broadcast(shape), self.kind(ref))

    def leaf(self, shape: Any, kind: str = "f64") -> int:
        rng, shape = self.rng, tuple(shape)
        floating = kind in ("f64", "f32")
        placements = None if rng.random() < 0.08 else self.placements(shape, floating)
        grad = floating and placements is not None and rng.random() < 0.85
        self.leaves.append(Leaf(shape, kind, grad, placements, rng.randrange(10**6)))
        self.leaf_values.append(self.leaves[-1].tensor().detach())
        return ~(len(self.leaves) - 1)

    def placements(self, shape: tuple[int, ...], partial: bool) -> tuple[Placement, ...]:
        out: list[Placement] = []
        for count in self.sizes:
            kinds: list[Placement] = [Replicate(), *([Partial()] * 2 if partial else [])]
            for dim, size in enumerate(shape):
                kinds.append(Shard(dim))
                free = all(getattr(p, "dim", None) != dim for p in out)
                kinds += [InterleavedShard(dim, g) for g in (2, 3) if free and size and size % (g * count) == 0]
            out.append(self.rng.choice(kinds))
        return tuple(out)

    def _refs(self) -> list[int]:
        return [*(~i for i in range(len(self.leaves))), *range(len(self.steps))]

    def _far_from_kinks(self, step: Step) -> bool:
        """True if no two values of the inputs, and none and zero, are nearly equal."""
        values = torch.cat([self.value(r).flatten().double() for r in dict.fromkeys(step.inputs)] + [torch.zeros(1)])
        exact = all(self.value(r).dtype is not torch.float32 for r in self._refs())
        gaps = values.sort()[0].diff()
        return gaps.numel() == 0 or gaps.min().item() > (1e-5 if exact else 2e-3)


def smaller(program: Program) -> list[Program]:
    """Simpler programs: fewer steps, a step's value as a leaf, plainer layouts. Those that are valid."""
    found = []
    for number in reversed(range(len(program.steps))):
        found.append(_without(program, number, None))
    if program.steps:
        _, values = program.on_one_device()
        for number, value in enumerate(values):
            if value.dtype in (torch.float64, torch.float32):
                kind = "f64" if value.dtype is torch.float64 else "f32"
                for first in (Replicate(), Partial(), *map(Shard, range(value.ndim))):
                    placements = (first, *[Replicate()] * (len(program.sizes) - 1))
                    leaf = Leaf(tuple(value.shape), kind, value.requires_grad, placements, number)
                    found.append(_without(program, number, leaf))
    for i, leaf in enumerate(program.leaves):
        for axis, placement in enumerate(leaf.placements or ()):
            if not isinstance(placement, Replicate):
                placements = list(leaf.placements)
                placements[axis] = Replicate()
                plain = replace(leaf, placements=tuple(placements))
                found.append(replace(program, leaves=(*program.leaves[:i], plain, *program.leaves[i + 1 :])))
        if leaf.grad:
            still = replace(leaf, grad=False)
            found.append(replace(program, leaves=(*program.leaves[:i], still, *program.leaves[i + 1 :])))
    return [one for one in found if one is not None and one.steps]


def _without(program: Program, number: int, instead: Leaf | None) -> Program | None:
    """The program without a step, its value replaced by a leaf; without both if nothing uses it."""
    used = any(number in step.inputs for step in program.steps)
    if used == (instead is None):
        return None
    leaves = (*program.leaves, instead) if instead else program.leaves
    renamed = {i: i if i < number else i - 1 for i in range(len(program.steps))}
    renamed[number] = ~(len(leaves) - 1)
    steps = [
        replace(step, inputs=tuple(renamed.get(i, i) for i in step.inputs))
        for i, step in enumerate(program.steps)
        if i != number
    ]
    needed = sorted({~i for step in steps for i in step.inputs if i < 0})
    again = {~old: ~new for new, old in enumerate(needed)}
    steps = [replace(step, inputs=tuple(again.get(i, i) for i in step.inputs)) for step in steps]
    return replace(program, leaves=tuple(leaves[i] for i in needed), steps=tuple(steps))


def _backward(wanted: list[Tensor], values: list[Tensor]) -> None:
    """Runs backward from a random cotangent on every value that has a gradient on one device."""
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w.dtype) for w in wanted]
    pairs = [(v, s) for v, w, s in zip(values, wanted, seeds) if w.requires_grad]
    if pairs:
        torch.autograd.backward([v for v, _ in pairs], [s for _, s in pairs])


def _difference(have: Any, want: Tensor, tolerance: float) -> str | None:
    if tuple(have.shape) != tuple(want.shape) or have.dtype != want.dtype:
        return f"{have.dtype}{list(have.shape)} for {want.dtype}{list(want.shape)}"
    layout = ""
    if isinstance(have, DTensor):
        layout, have = f" from {have.placements}", have.detach().full_tensor()
    have, want = have.detach(), want.detach()
    if tuple(have.shape) != tuple(want.shape):
        return f"the whole tensor is {list(have.shape)} for {list(want.shape)}{layout}"
    if want.numel() == 0:
        return None
    if not want.is_floating_point():
        return None if torch.equal(have, want) else f"{have.tolist()} for {want.tolist()}{layout}"
    worst = (have - want).abs().max().item()
    scale = 1 + want.abs().max().item()
    return None if worst <= tolerance * scale else f"off by {worst:.3g} where values are up to {scale - 1:.3g}{layout}"


def _tame(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.numel() > MOST_ELEMENTS:
        return False
    return value.numel() == 0 or bool(value.double().abs().max() < LARGEST)  # a NaN is not


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to)))


def _short(placement: Placement) -> str:
    if isinstance(placement, InterleavedShard):
        order = f", {placement.order}" if placement.order else ""
        return f"InterleavedShard({placement.dim}, {placement.groups}{order})"
    return {Replicate: "Replicate()", Partial: "Partial()"}.get(type(placement)) or f"Shard({placement.dim})"
