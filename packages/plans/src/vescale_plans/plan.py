"""Plan: how one model is sharded over named mesh axes. A plan is a value: readable, comparable, and making one runs
nothing.
"""

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
from ._plan.parts import Policy as Policy
from ._plan.parts import Precision as Precision
from ._plan.self_check import check_itself, check_kinds

if TYPE_CHECKING:
    from vescale_dtensor.engine import Picture

    from .search.decision import Against
    from .search.explain import Explanation


@dataclass(frozen=True, eq=False)
class Plan(PlanFields):
    """The complete sharding of one model.

    Globs: "*" also matches dots. In every mapping from globs, the first match in the written order decides, so write
    exceptions before the rule.

    Arguments:
        mesh: axis name -> size, outermost first. The product of the sizes is the world size.
        parameters: glob over parameter names -> placements. Every parameter must be decided: end with `"*": {}` to
            replicate the rest.
        boundaries: glob over module names -> Boundary.
        data_axis: the axis over which the batch (dim 0 of every tensor that enters the model) is sharded, or several
            axes, outermost first; None for no data parallelism. With several axes, ZeRO shards over the last and
            replicates over the others (hybrid sharding).
        zero: 1 shards optimizer states over the data axis, 2 also gradients, 3 also parameters. Without a data axis,
            ZeRO shards over the context axis, whose ranks have the same parameters.
        pipeline: the stages, see `Pipeline`.
        accumulation: the number of backwards that one optimizer step sums. The training loop makes them, one for each
            of `parts(batch)`. A pipeline uses its microbatches instead.
        checkpointing: glob over module names -> whether backward recomputes the activations inside. A glob also decides
            for all modules inside those that it matches. Of nested modules, the outermost is checkpointed.
        regather: glob over module names, as for `checkpointing` -> whether backward gathers an activation again that a
            conversion inside gathered, instead of keeping it.
        precision: see `Precision`; None computes in the parameters' dtype.
        offload: whether optimizer states are kept in host memory.
        prefetch: how many blocks are gathered ahead of the one that computes, if parameters are gathered per block
            (zero=3, or a precision); 0 gathers each block when it is reached.
        ahead_bytes: a bound in bytes on what is gathered ahead, and on the gradients whose reductions are in flight.
            Blocks that exceed it are not gathered ahead, and only one reduction instead of two is in flight. None sets
            no bound.
        blocks: glob over parameter names -> number of rows (dim 0) that ZeRO must keep together.
        expert_axis: the axis over which experts are spread.
        context_axis: the axis over which sequences are sharded (context parallelism): dim 1 of tensors that enter the
            model with two or three dims, dim 2 of masks with four. Functions that treat positions separately run on
            their part; `context` says how attention reaches the others. If a tensor's sequence is another dim, give it
            a `Boundary(arguments=...)` of the root, `""`.
        context: "ring", "all-to-all" (over heads), "gather" (of keys and values), or "auto", by cost. If heads do not
            divide, an all-to-all becomes a ring.
        context_layout: "contiguous" gives each rank one part of a sequence. "zigzag" gives it a front and a back part,
            in as many groups as balance the work of attention under causal masks, windows and packed documents
            (detected by `position_ids` that restart). "auto" is a zigzag if all attention of the model is causal,
            nothing else is known to mix positions, and `context` is "ring" or "auto". Outputs of the model keep the
            layout: they are DTensors, and `full_tensor()` returns them in order.
        sums: how gradients are summed over ranks that keep all of them (zero=0). "ordered" sums in rank order, as the
            other ZeRO stages do, so that all give the same bits. "all_reduce" uses one collective of the backend, with
            its order.
        offload_activations: glob over module names, as for `checkpointing` -> whether the tensors that backward needs
            of these modules are kept in host memory meanwhile: the inputs of a checkpointed module, the shard of a
            regathered activation.
        experts: glob over module names -> how the forward of an experts module whose form is not recognised is told the
            expert of each row. "counts": it takes rows [N, hidden], sorted by expert, and how many rows each expert has
            (TorchTitan's). "indices": it takes tokens [T, hidden], and indices and weights [T, k], as the recognised.
        policies: glob over names of modules and parameters -> `Policy`: ZeRO's stage, precision and prefetching of
            these. A glob also decides for all that is inside the modules that it matches.
        capacity_factor: each expert takes at most ceil(capacity_factor * tokens * k / experts) of the rows that choose
            it, the first in the order of the batch's tokens. The others add nothing. None drops nothing.

    Example:
        >>> Plan(
        ...     mesh={"dp": 2, "tp": 2},
        ...     parameters={"*.up.weight": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}},
        ...     boundaries={"*.mlp": Boundary(input={"tp": Replicate()}, output={"tp": Shard(1)})},
        ... )

    Raises PlanError if the plan names an axis that its mesh does not have, or a value has the wrong type. The model is
    not known yet; `validate` checks the plan against it.
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
        """Returns JSON text, with one glob per line and a fixed order of fields: equal plans give equal text."""
        return json.to_json(self)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> Plan:
        """Returns the plan that `to_json` wrote, from its text or from the parsed object.

        Raises PlanError for another format version, an unknown field, or an invalid value.
        """
        return cls(**json.from_json(text))

    @classmethod
    def from_huggingface(
        cls, model: nn.Module, *, mesh: Mapping[str, int], tensor_axis: str = "tp", **fields: Any
    ) -> Plan:
        """Returns the tensor parallelism that a HuggingFace model defines as its `tp_plan`.

        Arguments:
            model: a transformers model; its `tp_plan` may have been changed.
            mesh, tensor_axis: if the mesh lacks that axis, parameters are replicated.
            fields: further fields of the plan, such as `zero`.

        Raises PlanError if the model has no `tp_plan`, or uses an unknown style; the text names the parameter.
        """
        return cls(**import_hf.from_huggingface(model, mesh, tensor_axis, fields))

    def diff(self, other: Plan) -> table.PlanDiff:
        """Returns the differences to `other`, a `Change(where, before, after)` each, none for equal plans; prints as a
        table.
        """
        return table.diff(self, other)

    def override(self, **changes: Any) -> Plan:
        """Returns the plan with other values for some fields.

        New globs (`parameters`, `boundaries`, `checkpointing`, `regather`, `offload_activations`, `blocks`, `experts`,
        `policies`) are put before those of the plan, so they decide. A glob of the plan that a new one certainly covers
        is removed, and the value None removes a glob. Any other value replaces the plan's.

        Example:
            >>> plan.override(zero=3, parameters={"lm_head.weight": {}}, boundaries={"lm_head": None})

        Raises PlanError for a field that plans do not have, and as `Plan` does.
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
        """Explains why `generate_plan` made this plan: the next best plans, what limits each, and the reason for every
        block. It prints as tables, and `write_html` writes it as a page.

        With `against`, such as {"tp": 8} (settings as for `pin`), it shows what the best plan with these settings would
        take, and where it loses to this one.

        Raises PlanError for a plan that was written, overridden or read from JSON, because nothing was weighed for it;
        InfeasibleError if no candidate has the requested settings.
        """
        explanation = self.__dict__.get("_explanation")
        if explanation is None:
            remedies = [("generate_plan(model, world_size=..., batch=...).explain()", "says what it weighed")]
            raise PlanError("Plan.explain", "this plan was not made by generate_plan", (), remedies)
        return explanation if against is None else explanation.against(against)

    def validate(self, model: nn.Module, *, even: bool = False) -> None:
        """Raises PlanError for the first point in which the plan does not fit `model`.

        These are: a glob that matches nothing or decides nothing, a parameter that no glob decides, a dim that a
        parameter does not have or that does not divide into groups, tied parameters with different placements, a
        boundary's argument that a forward does not take, and a cut at a module that does not exist or is never called.
        With `even`, also dims and attention heads that do not divide by their axes: such shards are correct, but cost
        more communication. `parallelize` validates without `even`.
        """
        validate.fit(self, model, even=even)

    def draw(self, model: nn.Module) -> Picture:
        """Draws which rank holds which part of the model's parameters, for notebooks, and to `save(path)` as SVG.

        There is one row per kind of parameter: same name (except for numbers), shape and placements. No communication;
        no process group is needed, and no value is read.

        Raises PlanError if the plan does not fit the model.
        """
        return picture.draw(self, model)

    def complete(self, model: nn.Module, sample: Any = None) -> Plan:
        """Returns the plan with additional boundaries that reduce partial sums once, where sharded parameters alone
        leave this open.

        Without them, sums stay partial until they are needed, and each reader reduces them separately. This is correct,
        but sends several times more. The output of a weight that holds several parts (gate and up) and is sharded by
        `Shard` is gathered once; `InterleavedShard` needs no gather. Existing entries of the plan are kept;
        `plan.diff(plan.complete(model))` shows the additions.

        Arguments:
            model: is probed on the meta device, as by `generate_plan`, and is not changed.
            sample: the arguments of a call of the model, as for `generate_plan`.

        Example:
            >>> plan = Plan(mesh={"tp": 2}, parameters={"*.up.weight": column, "*.down.weight": row, "*": {}})
            >>> model, optimizer = parallelize(plan.complete(model, batch), model, make_optimizer)
        """
        from .search.complete import completed  # its folder's facade makes plans

        return completed(self, model, sample)

    def shard_batch(self, global_batch: Any) -> Any:
        """Shards a global batch that is the same on every rank into DTensors: dim 0 over the data axes, sequences over
        the context axis.

        A parallelized model does the same to plain tensors that enter it; this does it ahead of time, as a slice. No
        communication, and no check that the ranks agree.

        Arguments: tensors, in any nesting of tuples, lists and dicts.
        """
        return inputs.shard_batch(self, global_batch)

    def parts(self, batch: Any, model: nn.Module | None = None) -> Iterator[Any]:
        """Splits the batch along dim 0 into `accumulation` parts, one for each backward before an optimizer step. If
        the model is given and the plan keeps whole gradients (ZeRO 0, 1), gradients are reduced over ranks once, with
        the last part.

        Divide a loss that is a mean over rows by the number of parts, so that its gradients add up to those of the
        batch:

            >>> for part in plan.parts(batch, model):
            ...     (model(part) / plan.accumulation).backward()

        Arguments: tensors with the same number of rows, in any nesting of tuples, lists and dicts. The parts are views.
        Raises PlanError if the rows do not divide: parts of unequal size would have unequal weight in a mean.
        """
        return inputs.parts(self, batch, model)

    def local_batch(self, batch: Any, *, whole_sequences: bool = True) -> Any:
        """Returns this rank's part of the batch as DTensors of the global batch: dim 0 is sharded over the data axes,
        sequences over the context axis. Nothing is moved.

        Arguments:
            batch: tensors, in any nesting of tuples, lists and dicts. Ranks that differ only along other axes must pass
                the same part.
            whole_sequences: if True, ranks along the context axis pass the same whole sequences, which are sharded
                here. If False, each passes its part, as `local_sequence` defines it, so that no rank ever holds a whole
                sequence.

        Communicates: the ranks exchange shapes (a small all-gather). Parts may differ in size as those of torch.chunk
        do. Raises ShapeError, on all ranks alike, if the shapes do not fit.
        """
        return inputs.local_batch(self, batch, whole_sequences)

    def local_sequence(self, length: int) -> range:
        """Returns the positions of a sequence of `length` that this rank holds, for a loader that reads only these.

        Example:
            >>> part = plan.local_sequence(len(tokens))
            >>> batch = plan.local_batch({"input_ids": tokens[None, part.start : part.stop]}, whole_sequences=False)
        """
        return inputs.local_sequence(self, length)
