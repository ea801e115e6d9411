"""The small values that a plan is made of, and the error of all that is wrong with one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vescale_dtensor import Placement, VescaleError
from vescale_dtensor.engine import RECIPES

Placements = Mapping[str, Placement]
"""Axis name -> placement. For a parameter an axis that is not named replicates; at a boundary it stays as it is."""

GLOBS = (
    "parameters", "boundaries", "checkpointing", "regather", "offload_activations", "blocks", "experts", "policies",
)  # fmt: skip
"""The fields of a plan that map globs, in which order counts."""


class PlanError(VescaleError):
    """A plan does not fit its model, its mesh, or itself."""


def misfit(rule: str, facts: Sequence[str] = (), remedies: Sequence[tuple[str, str]] = ()) -> PlanError:
    """Returns the error of a plan that breaks this rule."""
    return PlanError("Plan", rule, facts, remedies)


@dataclass(frozen=True)
class Boundary:
    """Layouts at the boundary of a module. Tensors are converted to them explicitly when the module is called.

    Arguments:
        input: of the first tensor among the positional, then the keyword arguments.
        output: of the first tensor that the module returns.
        arguments: of further arguments, by parameter name.

    Cost: that of `DTensor.redistribute`; nothing if the layout already matches.
    """

    input: Placements = field(default_factory=dict)
    output: Placements = field(default_factory=dict)
    arguments: Mapping[str, Placements] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_mapping("Boundary", "arguments", self.arguments, "parameter names", '{"mask": {"tp": Shard(0)}}')


@dataclass(frozen=True)
class Pipeline:
    """A model divided into pipeline stages along one mesh axis.

    Arguments:
        axis: the mesh axis whose ranks hold the stages.
        cuts: names of the modules that begin stages 1, 2, ...; stage 0 begins with the model.
        schedule: the name of a schedule, or an explicit one, as its JSON dict.
        microbatches: the number of parts into which the batch is split (dim 0).
        virtual: stages per rank.
        owners: module -> the stage that owns its contents, for modules whose stage does not follow from the order of
            registration. Example: a head that `__init__` creates first gets the number of the last stage.
        loss: how the losses of the microbatches combine: "mean" or "sum". None derives it from the functions that
            compute the loss, and raises an error if it cannot.

    Raises PlanError for invalid values. `Plan` checks that the number of stages fits the mesh.
    """

    axis: str = "pp"
    cuts: tuple[str, ...] = ()
    schedule: str | Mapping[str, Any] = "1f1b"
    microbatches: int = 1
    virtual: int = 1
    loss: str | None = None
    owners: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.cuts, str):
            raise PlanError("Pipeline", f"cuts is {self.cuts!r}, not names", (), [(f"cuts=({self.cuts!r},)", "")])
        check_axis("Pipeline", "axis", self.axis, needed=True)
        remedies = [('cuts=("layers.4",)', "names, as in model.named_modules()")]
        if not isinstance(self.cuts, Iterable):
            raise PlanError("Pipeline", f"cuts is {self.cuts!r}, not names of modules", (), remedies)
        object.__setattr__(self, "cuts", tuple(self.cuts))
        for cut in self.cuts:
            if not isinstance(cut, str) or not cut:
                raise PlanError("Pipeline", f"cuts holds {cut!r}, which is not the name of a module", (), remedies)
        if len(set(self.cuts)) < len(self.cuts):
            twice = next(cut for cut in self.cuts if self.cuts.count(cut) > 1)
            raise PlanError("Pipeline", f"two stages begin with the module {twice!r}", (), [("name it once", "")])
        if not isinstance(self.schedule, (str, Mapping)) or not self.schedule:
            remedies = [('schedule="1f1b"', "")]
            rule = f"schedule is {self.schedule!r}, neither a name nor a schedule's JSON dict"
            raise PlanError("Pipeline", rule, (), remedies)
        for name in ("microbatches", "virtual"):
            check_count("Pipeline", name, getattr(self, name))
        if self.loss not in (None, "mean", "sum"):
            remedies = [('loss="mean"', "the mean of the microbatches' losses"), ('loss="sum"', "their sum")]
            raise PlanError("Pipeline", f"loss is {self.loss!r}, not one of 'mean', 'sum', None", (), remedies)

        check_mapping("Pipeline", "owners", self.owners, "module names", '{"head": 1}')
        object.__setattr__(self, "owners", dict(self.owners))
        for name, stage in self.owners.items():
            if type(stage) is not int or not 0 <= stage <= len(self.cuts):
                rule = f"owners gives {name!r} to stage {stage!r}, and {len(self.cuts)} cuts make {self.stages} stages"
                raise PlanError("Pipeline", rule, (), [(f"owners={{{name!r}: {len(self.cuts)}}}", "the last stage")])

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1


@dataclass(frozen=True)
class Precision:
    """Mixed precision: parameters are stored and updated in the dtype in which the model was built.

    Arguments:
        compute: floating dtype of parameters, and of floating inputs of the model and of its blocks, in forward and
            backward.
        reduce: floating dtype in which gradients are summed over ranks, of parameters that `compute` changes.
        sent: dtype in which gradients are sent to be summed; None means `reduce`. A floating dtype, or torch.int8 (one
            scale per 256 numbers, errors up to 1/254 of the largest of them; it sends a quarter of float32's bytes).
            Sums over axes outside ZeRO, and gathers after the sum, stay in `reduce`.
        output: floating dtype to which floating outputs are cast, of the model, or of the modules whose `Policy` this
            is part of; None leaves them.
        cast_inputs: whether inputs are cast to `compute`.
        products: how linear layers (`F.linear` with one of these parameters) multiply, forward and backward:
            "fp8_tensorwise", "fp8_rowwise", as torchao's recipes of these names; None in `compute`. Scales are those of
            global tensors: one small collective for each operand that is cut.

    Raises PlanError for another dtype.
    """

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    sent: torch.dtype | None = None
    output: torch.dtype | None = None
    cast_inputs: bool = True
    products: str | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "output"):
            dtype = getattr(self, name)
            if dtype not in TRAINED_IN and (name, dtype) != ("output", None):
                remedies = [(f"{name}=torch.bfloat16", ""), (f"{name}=torch.float32", "")]
                rule = f"{name} is {dtype!r}, not one of {_names(TRAINED_IN)}: in others torch has no sums and products"
                raise PlanError("Precision", rule, (), remedies)
        sent = self.sent
        if sent not in (None, torch.int8, *TRAINED_IN):
            remedies = [("sent=torch.int8", "a quarter of float32's bytes"), ("sent=None", "exact")]
            rule = f"sent is {sent!r}, not one of {_names(TRAINED_IN)}, torch.int8 or None"
            raise PlanError("Precision", rule, (), remedies)
        if not isinstance(self.cast_inputs, bool):
            rule = f"cast_inputs is {self.cast_inputs!r}, neither True nor False"
            raise PlanError("Precision", rule, (), [("cast_inputs=False", "the model casts itself")])
        if self.products not in (None, *RECIPES):
            rule = f"products is {self.products!r}, not one of {', '.join(map(repr, RECIPES))} or None"
            raise PlanError("Precision", rule, (), [(f'products="{one}"', "") for one in RECIPES])
        if self.products is not None and self.compute is torch.float64:
            rule = f"products of {self.products} add up in float32, and compute is torch.float64"
            raise PlanError("Precision", rule, (), [("compute=torch.bfloat16", ""), ("products=None", "")])


@dataclass(frozen=True)
class Policy:
    """How a part of a model is treated, where it is not as the plan says for all; None is as the plan says.

    Arguments:
        zero: the stage of ZeRO of these parameters. 2 keeps them gathered between forward and backward (FSDP2's
            `reshard_after_forward=False`), 0 whole on every rank, optimizer states included.
        precision: of these parameters, and of the inputs and outputs of the outermost modules among them.
        prefetch: how many blocks are gathered ahead while one of these computes.

    Raises PlanError for invalid values.
    """

    zero: int | None = None
    precision: Precision | None = None
    prefetch: int | None = None

    def __post_init__(self) -> None:
        counts = [one for one in (self.zero, self.prefetch) if one is not None]
        fits = all(type(one) is int and one >= 0 for one in counts) and (self.zero or 0) <= 3
        if not fits or not isinstance(self.precision, Precision | None):
            given = f"zero={self.zero!r}, precision={self.precision!r}, prefetch={self.prefetch!r}"
            remedies = [("Policy(zero=2, precision=Precision(), prefetch=1)", "or None, for the plan's")]
            raise PlanError("Policy", f"{given} are no stage, Precision and number of blocks", (), remedies)


TRAINED_IN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that every function of a model computes in."""


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(map(str, dtypes))


def check_mapping(operation: str, name: str, value: Any, of: str = "globs", example: str = '{"*": ...}') -> None:
    """Raises PlanError unless `value` is a mapping from words."""
    if not isinstance(value, Mapping):
        raise PlanError(operation, f"{name} is {value!r}, not a mapping from {of}", (), [(f"{name}={example}", "")])
    for key in value:
        if not isinstance(key, str):
            rule = f"{name} names {key!r}, which is none of {of}: it is no text"
            raise PlanError(operation, rule, (), [(f"{name}={example}", "")])


def check_axis(operation: str, name: str, value: Any, *, several: bool = False, needed: bool = False) -> None:
    """Raises PlanError unless `value` names a mesh axis; several of them, where they may be; or is None, if it may."""
    if isinstance(value, str) or (value is None and not needed):
        return
    if several and isinstance(value, (tuple, list)) and all(isinstance(axis, str) for axis in value):
        return
    remedies = [(f'{name}="dp"', "an axis of the mesh")]
    remedies += [(f'{name}=("dpr", "dp")', "several, outermost first")] if several else []
    remedies += [] if needed else [(f"{name}=None", "")]
    raise PlanError(operation, f"{name} is {value!r}, not the name of a mesh axis", (), remedies)


def check_count(operation: str, name: str, value: Any) -> None:
    """Raises PlanError unless `value` is a positive int."""
    if type(value) is not int or value < 1:
        raise PlanError(operation, f"{name} is {value!r}, not a positive number", (), [(f"{name}=1", "")])
