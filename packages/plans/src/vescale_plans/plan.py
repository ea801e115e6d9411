"""Plan: how one model is sharded over named mesh axes. A value: readable, comparable, nothing runs by making one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from . import import_hf
from ._apply import inputs
from ._plan import json, picture, table, validate
from ._plan.fields import PlanFields
from ._plan.match import covers, nearest
from ._plan.parts import GLOBS, check_mapping
from ._plan.parts import Boundary as Boundary
from ._plan.parts import Pipeline as Pipeline
from ._plan.parts import Placements as Placements
from ._plan.parts import PlanError as PlanError
from ._plan.parts import Precision as Precision
from ._plan.self_check import check_itself, check_kinds

if TYPE_CHECKING:
    from vescale_dtensor.engine import Picture

    from .search.decision import Against
    from .search.explain import Explanation


@dataclass(frozen=True, eq=False)
class Plan(PlanFields):
    """The complete sharding of one model.

    Globs: "*" also matches dots. In every mapping from globs the first that matches a
    name decides, in the order written: write exceptions before the rule.

    Arguments:
        mesh: axis name -> size, outermost first; their product is the world size.
        parameters: glob over parameter names -> placements. Every parameter must be
            decided: end with `"*": {}` to replicate the rest.
        boundaries: glob over module names -> Boundary.
        data_axis: the axis over which the batch (dim 0 of every tensor that enters
            the model) is sharded, or several, outermost first; None for no data
            parallelism. Of several, ZeRO shards over the last, and replicates over
            the others (hybrid sharding).
        zero: 1 shards optimizer states over the data axis, 2 gradients too, 3 parameters too; without a data axis over
            the context axis, whose ranks have the same parameters.
        pipeline: the stages, see `Pipeline`.
        accumulation: backwards that one optimizer step sums. The loop makes them, one for each of `parts(batch)`; a
            pipeline has its microbatches for that.
        checkpointing: glob over module names -> whether the activations inside are
            computed again in backward. A glob also decides for all modules inside those
            that it matches; of nested modules the outermost is checkpointed.
        regather: glob over module names, likewise -> whether an activation that a
            conversion inside gathered is gathered again in backward, not kept.
        precision: see `Precision`; None computes in the parameters' dtype.
        offload: optimizer states live in host memory.
        prefetch: blocks whose parameters are gathered ahead of the one that computes, where they are gathered for it
            (zero=3, or a precision); 0 gathers each when it is reached.
        ahead_bytes: bound of what is gathered ahead, and of the gradients whose sums are under way: what would not fit
            is not gathered ahead, and of sums only one is under way then, else two. None bounds neither by bytes.
        blocks: glob over parameter names -> rows (dim 0) that ZeRO must not split.
        expert_axis: the axis over which experts are spread.
        context_axis: the axis over which sequences are cut (dim 1 of tensors that enter the model with two or three
            dims; dim 2 of masks with four): context parallelism. What treats positions one by one runs on its part;
            attention meets the rest as `context` says. A tensor whose sequence is another dim gets a
            `Boundary(arguments=...)` of the root, `""`.
        context: "ring", "all-to-all" (over heads), "gather" (of keys and values), or "auto", by cost. Where heads do
            not divide, an all-to-all is a ring.
        context_layout: "contiguous", each rank one part of a sequence; "zigzag", a front and a back part, of as many
            groups as balance the work of attention under causal masks, windows and packed documents (told by
            `position_ids` that begin anew); or "auto", a zigzag where all attention of the model says that it is
            causal, nothing else is known to mix positions, and `context` is "ring" or "auto". What leaves the model
            keeps the layout: it is a DTensor, of which `full_tensor()` is in order.
        sums: how gradients are summed over ranks that keep all of them (zero=0): "ordered", in the order of the ranks,
            which other ZeRO stages have too, so that all give the same bits; or "all_reduce", by one collective of the
            backend, in whatever order that has.
        offload_activations: glob over module names, likewise -> whether what backward needs of what is computed inside
            lies in host memory until then: of a checkpointed module what it was called with, of a regathered activation
            its shard.
        capacity_factor: each expert takes at most ceil(capacity_factor * tokens * k / experts) of the rows that
            choose it, the first in the order of the batch's tokens; the others add nothing. None drops nothing.

    Example:
        >>> Plan(
        ...     mesh={"dp": 2, "tp": 2},
        ...     parameters={"*.up.weight": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}},
        ...     boundaries={"*.mlp": Boundary(input={"tp": Replicate()}, output={"tp": Shard(1)})},
        ... )

    Raises PlanError when it names an axis that its mesh does not have, or a value is
    not of the kind above; nothing is known of a model yet.
    """

    def __post_init__(self) -> None:
        for name in ("mesh", *GLOBS):  # a caller's own mapping may change later
            if isinstance(getattr(self, name), Mapping):
                object.__setattr__(self, name, dict(getattr(self, name)))
        check_kinds(self)
        axes = (self.data_axis,) if isinstance(self.data_axis, str) else tuple(self.data_axis or ())
        if self.data_axis == "dp" and "dp" not in self.mesh:
            axes = ()  # the default may be absent; an axis that somebody wrote may not
        object.__setattr__(self, "data_axis", axes if len(axes) > 1 else next(iter(axes), None))
        check_itself(self)

    def __eq__(self, other: object) -> bool:
        """Also the order of globs is the same: it decides."""
        return isinstance(other, Plan) and not self.diff(other)

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __str__(self) -> str:
        """An aligned table: a line per glob, a column per mesh axis."""
        return table.table(self)

    def to_json(self) -> str:
        """JSON text, one glob a line, in a fixed order of fields: equal plans give equal text."""
        return json.to_json(self)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> Plan:
        """The plan that `to_json` wrote, from its text or from the object that it parses to.

        Raises PlanError for another format version, an unknown field, or a value that
        a plan does not take.
        """
        return cls(**json.from_json(text))

    @classmethod
    def from_huggingface(
        cls, model: nn.Module, *, mesh: Mapping[str, int], tensor_axis: str = "tp", **fields: Any
    ) -> Plan:
        """The tensor parallelism that a HuggingFace model ships as its `tp_plan`.

        Arguments:
            model: a transformers model; its `tp_plan` may have been changed.
            mesh, tensor_axis: without that axis in the mesh, parameters replicate.
            fields: further fields of the plan, such as `zero`.

        Raises PlanError for a model that ships none, and for a style that is not known,
        naming the parameter.
        """
        return cls(**import_hf.from_huggingface(model, mesh, tensor_axis, fields))

    def diff(self, other: Plan) -> table.PlanDiff:
        """What differs in `other`, a `Change(where, before, after)` each, none for equal plans; prints as a table."""
        return table.diff(self, other)

    def override(self, **changes: Any) -> Plan:
        """The plan with other values of some fields.

        Globs (`parameters`, `boundaries`, `checkpointing`, `regather`,
        `offload_activations`, `blocks`) are added to those of the plan and come first,
        so that they decide; a glob of the plan that one of them surely covers goes, and
        None removes a glob. Any other value replaces the plan's.

        Example:
            >>> plan.override(zero=3, parameters={"lm_head.weight": {}}, boundaries={"lm_head": None})

        Raises PlanError for a field that plans do not have, or as `Plan` does.
        """
        names = [f.name for f in fields(self)]
        for name, value in changes.items():
            if name not in names:
                near = nearest(name, names)
                remedies = [(f"use {near[0]!r}", "")] if near else [("remove it", "")]
                raise PlanError("Plan.override", f"a plan has no field {name!r}", (), remedies)
            if name in GLOBS and isinstance(value, Mapping):
                check_mapping("Plan.override", name, value)
                kept = {g: v for g, v in getattr(self, name).items() if not any(covers(new, g) for new in value)}
                changes[name] = {glob: v for glob, v in value.items() if v is not None} | kept
        return replace(self, **changes)

    @overload
    def explain(self) -> Explanation: ...
    @overload
    def explain(self, against: Mapping[str, Any]) -> Against: ...
    def explain(self, against: Mapping[str, Any] | None = None) -> Explanation | Against:
        """Why `generate_plan` made this plan: the next best, what binds each, per block why; prints as tables, and
        writes itself as a page (`write_html`).

        With `against`, such as {"tp": 8}: what the best plan with these settings (as for `pin`) would take, and where
        it loses to this one.

        Raises PlanError for a plan that was written, overridden or read from JSON: nothing was weighed for it;
        InfeasibleError where no candidate has the settings asked for.
        """
        explanation = self.__dict__.get("_explanation")
        if explanation is None:
            remedies = [("generate_plan(model, world_size=..., batch=...).explain()", "says what it weighed")]
            raise PlanError("Plan.explain", "this plan was not made by generate_plan", (), remedies)
        return explanation if against is None else explanation.against(against)

    def validate(self, model: nn.Module, *, even: bool = False) -> None:
        """Raises PlanError for the first thing in which the plan does not fit `model`.

        That is: a glob that matches nothing or decides nothing, a parameter that none
        decides, a dim that a parameter does not have or that does not divide into groups,
        tied parameters placed differently, a boundary's argument that a forward does not
        take, a cut at a module that is not there or is never called. With `even` also
        dims and attention heads that do not divide by their axes: such shards are right,
        and cost more communication. `parallelize` validates without `even`.
        """
        validate.fit(self, model, even=even)

    def draw(self, model: nn.Module) -> Picture:
        """A picture of which rank holds what of the model's parameters, for notebooks, and to `save(path)` as SVG.

        A row per kind of parameter: alike in name, but for numbers, in shape and in placements. Nothing is sent, no
        process group is needed, and no value is read.

        Raises PlanError where the plan does not fit the model.
        """
        return picture.draw(self, model)

    def complete(self, model: nn.Module, sample: Any = None) -> Plan:
        """The plan with boundaries where cut parameters alone leave open when a sum of parts is made whole.

        Without them sums stay partial until something needs them, each reader for itself: right, with several times
        the traffic. What the plan says already stands; `plan.diff(plan.complete(model))` shows what is added.

        Arguments:
            model: is probed on the meta device, as by `generate_plan`, and left as it is.
            sample: what the model is called with, as for `generate_plan`.

        Example:
            >>> plan = Plan(mesh={"tp": 2}, parameters={"*.up.weight": column, "*.down.weight": row, "*": {}})
            >>> model, optimizer = parallelize(plan.complete(model, batch), model, make_optimizer)
        """
        from .search.complete import completed  # its folder's facade makes plans

        return completed(self, model, sample)

    def shard_batch(self, global_batch: Any) -> Any:
        """The global batch, the same on every rank, as DTensors sharded over the data axes (dim 0), and their sequences
        over the context axis.

        What a model does to plain tensors that enter it, made ahead: a slice, no
        communication, and no check that the ranks agree.

        Arguments: tensors, in any nesting of tuples, lists and dicts.
        """
        return inputs.shard_batch(self, global_batch)

    def parts(self, batch: Any, model: nn.Module | None = None) -> Iterator[Any]:
        """The batch cut along dim 0 into `accumulation` parts, one for each backward before an optimizer step. With the
        model, gradients are reduced over ranks once, with the last part, where the plan keeps them whole (ZeRO 0, 1).

        A loss that is a mean over rows is divided by their number, so that its gradients add up to the batch's:

            >>> for part in plan.parts(batch, model):
            ...     (model(part) / plan.accumulation).backward()

        Arguments: tensors with the same number of rows, in any nesting of tuples, lists and dicts. The parts are
        views. Raises PlanError where rows do not divide: parts of unequal size would weigh unequally in a mean.
        """
        return inputs.parts(self, batch, model)

    def local_batch(self, batch: Any, *, whole_sequences: bool = True) -> Any:
        """This rank's part of the batch as DTensors sharded over the data axes (dim 0), and their sequences over the
        context axis; nothing is moved.

        Arguments:
            batch: tensors, in any nesting of tuples, lists and dicts. Ranks that differ only along other axes must
                give the same part.
            whole_sequences: ranks along the context axis give the same whole sequences, which are cut here. False:
                each gives its part of them, as `local_sequence` cuts it, so that no rank ever holds a whole one.

        The ranks exchange shapes (a small all-gather); parts may differ in size as
        torch.chunk's do. Raises ShapeError, on all ranks alike, when they do not fit.
        """
        return inputs.local_batch(self, batch, whole_sequences)

    def local_sequence(self, length: int) -> range:
        """The places of a sequence of `length` that this rank holds, for a loader that reads no others.

        Example:
            >>> part = plan.local_sequence(len(tokens))
            >>> batch = plan.local_batch({"input_ids": tokens[None, part.start : part.stop]}, whole_sequences=False)
        """
        return inputs.local_sequence(self, length)
