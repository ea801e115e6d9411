"""`as_strided`: sizes, strides and an offset in the memory of one device, or a typed error, on all ranks alike."""

import pytest
import torch

from vescale_dtensor import OperatorError, Partial, Replicate, Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

SHAPES = [(3, 4), (1, 4), (4, 1), (2, 3, 2)]
OF = {
    "itself": lambda x: x,
    "detached": lambda x: x.detach(),
    "whole slice": lambda x: x[:],
    "other dims": lambda x: x.view(-1),
    "computed": lambda x: x + 0,
    "computed, transposed": lambda x: x.transpose(0, 1) + 0,
    "transposed": lambda x: x.transpose(0, 1),
    "row": lambda x: x[-1],
    "later rows": lambda x: x[1:],
    "first rows": lambda x: x[:1],
    "later columns": lambda x: x[:, 1:],
    "first columns": lambda x: x[:, :2],
    "column": lambda x: x[:, 0],
    "row of later columns": lambda x: x[:, 1:][-1],
    "a row's clone": lambda x: x[-1].clone(),
}
TAKEN = [((2, 2), (4, 1)), ((2, 2), (1, 2)), ((1,), (3,))]
OFFSETS = [None, 0, 1]
# Which never raise: the tensor's memory is its own.
KNOWN = {"itself", "detached", "whole slice", "computed", "a row's clone"}


def answer(view, of, *how):
    """The numbers, or the class of the error, and what is to be said of them."""
    try:
        out = view(of).as_strided(*how)
        return (out.full_tensor() if hasattr(out, "full_tensor") else out).detach()
    except OperatorError as error:
        return str(error)
    except RuntimeError as error:
        return "out of bounds" if "out of bounds" in str(error) else f"{type(error).__name__}: {error}"


def program(sizes, grad):
    mesh, wrong, said = mesh_of(*sizes), [], []
    for shape in SHAPES if len(sizes) == 1 else SHAPES[:2]:
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        places = [Replicate(), Partial(), *map(Shard, range(len(shape)))]
        for placements in [(a,) if len(sizes) == 1 else (a, b) for a in places for b in places[-2:]]:
            for name, view in OF.items():
                for size, stride in TAKEN:
                    for offset in OFFSETS:
                        plain = whole.clone().requires_grad_(grad)
                        ours = distribute_tensor(whole.clone().requires_grad_(grad), mesh, placements)
                        want, got = (answer(view, one, size, stride, offset) for one in (plain, ours))
                        case = (shape, placements, name, size, stride, offset)
                        said.append((case, got if isinstance(got, str) else "numbers"))
                        if isinstance(got, str):
                            fine = name not in KNOWN or got == want
                            fine = fine and not got.startswith("RuntimeError")
                        else:
                            fine = isinstance(want, torch.Tensor) and torch.equal(got, want)
                        if not fine:
                            wrong.append((case, want, got))
    return wrong, said


@pytest.mark.parametrize("sizes, grad", [((2,), False), ((2,), True), ((2, 2), False)])
def test_numbers_are_those_of_one_device_or_all_ranks_raise(sizes, grad):
    answers = run_ranks(torch.Size(sizes).numel(), program, sizes, grad)
    for wrong, said in answers:
        assert not wrong, (len(wrong), wrong[:3])
        assert said == answers[0][1]
