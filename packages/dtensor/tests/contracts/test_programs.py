"""Random programs on random layouts equal one device, values and gradients.

150 of 2,400; all with VESCALE_GRID=full. A failure is reported as the
smallest program that still fails, as text that can be made a test below.
"""

import json
import re
import warnings

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import InterleavedShard, Partial, Replicate, Shard
from vescale_dtensor._errors import CommunicationError, VescaleError
from vescale_testkit import RankError, in_turns, mesh_of, run_ranks, slice_of
from vescale_testkit.generators.programs import Program, random_program, smaller
from vescale_testkit.oracle import compare

PROGRAMS, SLICES, BATCH = 2400, 16, 100


def outcomes(programs: list[Program]) -> list[tuple[str, str] | None]:
    """Per program, on this rank: None if it equals one device, ("wrong" or "raises", text) otherwise.

    Any other error may be this rank's alone, with the others in a collective, and ends the call.
    """
    warnings.simplefilter("ignore")
    found = []
    for program in programs:
        try:
            wrong = program.failure(mesh_of(*program.sizes))
            found.append(("wrong", wrong) if wrong else None)
        except CommunicationError:
            raise
        except VescaleError as error:
            found.append(("raises", f"{type(error).__name__}: {error}"))
        except Exception as error:
            raise RuntimeError(f"program {program.seed}: {type(error).__name__}: {error}") from error
    return found


def run(programs: list[Program]) -> list[tuple[str, str] | None]:
    """The outcome per program over all ranks, the worst; a program that ends the call is told from the rest."""
    if not programs:
        return []
    try:
        ranks = run_ranks(4, outcomes, programs, timeout=120.0)
    except RankError as error:
        named = re.search(r"program (\d+): ", str(error.__cause__))
        at = next((i for i, p in enumerate(programs) if named and p.seed == int(named[1])), len(programs) // 2)
        if len(programs) == 1:
            return [("wrong", f"ends a rank: {error.__cause__ or error}")]
        return run(programs[:at]) + run(programs[at : at + 1]) + run(programs[at + 1 :])
    worst = []
    for per_rank in zip(*ranks, strict=True):
        kinds = {None if one is None else one[0] for one in per_rank}
        if len(kinds) > 1 and "wrong" not in kinds:
            worst.append(("wrong", f"ranks disagree: {per_rank}"))
        else:
            worst.append(next((one for one in per_rank if one is not None and one[0] == "wrong"), per_rank[0]))
    return worst


def smallest(program: Program, rounds: int = 40) -> tuple[Program, str]:
    """A simpler program that is wrong as well, and how."""
    text = run([program])[0][1]
    for _ in range(rounds):
        for simpler in smaller(program):
            outcome = run([simpler])[0]
            if outcome is not None and outcome[0] == "wrong":
                program, text = simpler, outcome[1]
                break
        else:
            break
    return program, text


@in_turns(3)
@pytest.mark.filterwarnings("ignore")  # of a variance of one number
def test_random_programs_equal_one_device(capsys):
    seeds = slice_of(range(PROGRAMS), SLICES)
    raised, wrong = [], []
    for start in range(0, len(seeds), BATCH):
        programs = [random_program(seed) for seed in seeds[start : start + BATCH]]
        for program, outcome in zip(programs, run(programs)):
            if outcome is not None:
                (wrong if outcome[0] == "wrong" else raised).append((program, outcome[1]))
    with capsys.disabled():
        print(json.dumps({"programs": len(seeds), "wrong": len(wrong), "raise": len(raised)}))
    if wrong:
        shown = [smallest(program) for program, _ in wrong[:3]]
        seeds = [program.seed for program, _ in wrong]
        pytest.fail(f"{len(wrong)} wrong, seeds {seeds}\n" + "\n".join(f"{p}\n  -> {text}" for p, text in shown))
    assert len(raised) <= len(seeds) // 50, "\n".join(f"{program}\n  -> {text}" for program, text in raised)


# --- what random programs found ------------------------------------------------------------


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


def test_a_rank_without_input_channels_still_adds_its_part_of_a_pending_bias():
    """conv1d returned zeros on it, and its part of the bias was lost."""

    def work():
        r, p, s = Replicate(), Partial(), Shard(1)
        for bias in ([r, p], [p, p], [r, InterleavedShard(0, 3)], [Shard(0), p]):
            compare(F.conv1d, [randn(4, 2, 6), randn(6, 2, 3), randn(6)], [[r, r], [s, s], bias], mesh_of(2, 2))
        x, w = randn(2, 1, 4, 3), randn(1, 4, 3, 3)
        compare(F.conv_transpose2d, [x, w, randn(4)], [[s], [Shard(0)], [p]], mesh_of(4))

    run_ranks(4, work)


def test_an_einsum_label_of_size_0_broadcasts_1():
    """The result's shape said 1."""

    def work():
        mesh, r = mesh_of(2, 2), [Replicate(), Replicate()]
        compare(lambda x, y: torch.einsum("a,y->ya", x, y), [randn(3), randn(0)], [r, r], mesh)
        compare(
            lambda x, y: torch.einsum("abcd,ad->cdab", x, y), [randn(1, 5, 0, 1), randn(1, 1)], [r, r], mesh_of(2, 2)
        )
        compare(lambda x, y: torch.einsum("ab,ab->ab", x, y), [randn(1, 2), randn(0, 2)], [r, r], mesh)

    run_ranks(4, work)


def test_bilinear_on_an_empty_shard():
    """torch refuses it: that rank raised, and the others waited for it."""

    def work():
        r, p, s = [Replicate()], [Partial()], [Shard(1)]
        x, y, w, b = randn(4, 1), randn(4, 6), randn(7, 1, 6), randn(7)
        compare(F.bilinear, [x, y, w], [r, r, s], mesh_of(4))
        compare(F.bilinear, [x, y, w, b], [r, r, s, p], mesh_of(4))
        compare(F.bilinear, [x, y, w, b], [r, [Shard(0)], r, r], mesh_of(4))
        compare(F.bilinear, [x, y, w, b], [r, r, [Shard(0)], [Shard(0)]], mesh_of(4))

    run_ranks(4, work)
