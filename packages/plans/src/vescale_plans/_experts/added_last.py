"""Parameters of experts that are whole on an axis over which the others are split: which of them may count once.

    rank 0    part of a sum, + bias        a bias that is added last belongs to the sum once, so all ranks but the
    rank 1    part of a sum, + 0           first of the axis see zeros in its place

What is added last is found by trial on each rank's own slices, filled with random numbers: two rows of an expert must
move by the same amount when the parameter comes, and all zeros must give zeros. A scale, or what is added before a
nonlinearity, moves two rows differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Forward = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]


def added_last(forward: Forward, shapes: Mapping[str, torch.Size], whole: str, width: int, like: Tensor) -> bool:
    """True if the parameter `whole` is added to the experts' output, and does nothing else.

    Arguments:
        forward: the output [rows, hidden] for parameters by name, rows [rows, width], and the expert of each.
        shapes: of the parameters, all with this rank's experts in dim 0.
        like: whose dtype and device the trial takes.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(like)

    parameters = {name: random(*shape) / 4 for name, shape in shapes.items()}
    count = shapes[whole][0]
    rows, experts = random(2 * count, width), torch.arange(count, device=like.device).repeat(2)
    nothing = {name: torch.zeros_like(value) for name, value in parameters.items()}
    try:
        with torch.no_grad():
            without = forward(parameters | {whole: nothing[whole]}, rows, experts)
            moved = forward(parameters, rows, experts) - without
            blank = forward(nothing, rows, experts)
    except Exception:  # it does not fit the slices of the others
        return False
    tolerance = 1e-2 if like.itemsize < 4 else 1e-4
    return bool(torch.allclose(moved[:count], moved[count:], rtol=tolerance, atol=tolerance) and not blank.any())
