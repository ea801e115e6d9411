"""Checks that all ranks have the same plan, and the same values in the model, before it is sharded."""

from __future__ import annotations

from torch import nn

from vescale_dtensor import DTensor, PlainTensorError
from vescale_rng import is_deferred, recorded

from ..plan import Plan, PlanError
from .inputs import checksum
from .together import gather


def check_same_plan(plan: Plan, device: str) -> None:
    """Raises PlanError, on all ranks alike, when a rank was given another plan, or type of device, than rank 0.

    Cost: one small all-gather over the world.
    """
    everyone = gather((plan, device), "comparing the plans of all ranks")
    first, its_device = everyone[0]
    for rank, (theirs, device) in enumerate(everyone):
        if device != its_device:
            raise PlanError(
                "parallelize",
                f"the model of rank {rank} is on a different type of device than that of rank 0",
                [f"rank 0 on {its_device}, rank {rank} on {device}"],
                [("build the model on the same type of device on every rank", "")],
            )
        if theirs != first:
            raise PlanError(
                "parallelize",
                f"rank {rank} was given a different plan than rank 0",
                str(first.diff(theirs)).splitlines(),
                [("make the plan from values that are equal on all ranks", "not from a rank, a host or a clock")],
            )


def check_same_values(sums: dict[str, int]) -> None:
    """Raises PlainTensorError, on all ranks alike, when a parameter or a buffer has other values on a rank than on
    rank 0.

    Cost: one small all-gather over the world.
    """
    everyone = gather(tuple(sums.items()), "comparing the parameters and buffers of all ranks")
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        for kind in ("parameter", "buffer"):
            mine, others = ([name for name, _ in held if name.startswith(kind)] for held in (everyone[0], theirs))
            if mine != others:
                raise PlainTensorError(
                    "parallelize",
                    f"the model has different {kind}s on rank {rank} than on rank 0",
                    [f"{len(mine)} {kind}s on rank 0, {len(others)} on rank {rank}"],
                    [("build the same model on every rank", "")],
                )
        name = next(name for (name, mine), (_, other) in zip(everyone[0], theirs) if mine != other)
        raise PlainTensorError(
            "parallelize",
            f"the {name} has different values on rank {rank} than on rank 0",
            (),
            [
                ("torch.manual_seed(seed) before the model is built", "the same on every rank"),
                ("torch.zeros(...) in place of torch.empty(...)", "memory that nothing has written differs"),
            ],
        )


def checksums(model: nn.Module) -> dict[str, int]:
    """Checksums of the values of every parameter and plain buffer, by their names in errors."""
    held = {f"parameter {name!r}": parameter for name, parameter in model.named_parameters()}
    plain = {f"buffer {name!r}": one for name, one in model.named_buffers() if type(one) is not DTensor}
    return {name: recorded(one) if is_deferred(one) else checksum(one) for name, one in (held | plain).items()}
