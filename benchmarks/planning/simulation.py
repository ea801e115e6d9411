"""What simulating many ranks takes beyond their own computing: CPU seconds of `vescale.simulate` over their sum.

Measured in turns, one rank alone and all of them, for processors do not keep their clock; the median of the ratios.

The sum is that of one rank in a world without the others (torch's fake group), times as many as there are: the same
calls and the same buffers, and collectives that return at once. Warm steps of the small GPT, dp 8 x tp 8, ZeRO-3.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import vescale
from vescale_dtensor.engine import faking

sys.path.insert(0, str(Path(__file__).absolute().parents[2] / "examples"))
BUDGET = 1.5
STEPS, ROUNDS = 3, 3


def build(data: int, tensor: int) -> Callable[[], float]:
    """One step of training on this rank."""
    from nanogpt.model import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, block_size=128, n_head=8))
    rows, columns, whole = {"tp": vescale.Shard(0)}, {"tp": vescale.Shard(1)}, {"tp": vescale.Replicate()}
    cut = vescale.Boundary(input=whole, output={"tp": vescale.Shard(1)})
    layers = {"*.c_attn.*": {"tp": vescale.InterleavedShard(0, 3)}, "*.c_fc.*": rows, "*.c_proj.weight": columns}
    plan = vescale.Plan(
        mesh={"dp": data, "tp": tensor},
        parameters={**layers, "*.wte.*": rows, "lm_head.*": rows, "*": {}},
        boundaries={"*.attn": cut, "*.mlp": cut, "lm_head": vescale.Boundary(input=whole)},
        zero=3,
    )
    model, optimizer = vescale.parallelize(plan, model, torch.optim.AdamW)
    ids = torch.randint(0, 256, (2 * data, 129))

    def step() -> float:
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def seconds(data: int, tensor: int) -> list[float]:
    """Of this process's CPU, per step, between barriers: where ranks are threads, the time of all."""
    step = build(data, tensor)
    taken = []
    for _ in range(STEPS + 1):
        dist.barrier()
        begun = time.process_time()
        step()
        dist.barrier()
        taken.append(time.process_time() - begun)
    return taken[1:]


@contextlib.contextmanager
def alone(size: int):
    """Rank 0 of a world whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with faking("gloo"):
            yield
    finally:
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=int, nargs=2, default=(8, 8), metavar=("DP", "TP"))
    parser.add_argument("--report-only", action="store_true", help="fail for no figure")
    chosen = parser.parse_args()
    data, tensor = chosen.mesh
    ranks = data * tensor
    torch.set_num_threads(1)
    rounds = []
    for _ in range(ROUNDS):
        with alone(ranks):
            before = min(seconds(data, tensor))
        all_of_them = min(vescale.simulate(seconds, data, tensor, ranks=ranks)[0])
        with alone(ranks):
            one = (before + min(seconds(data, tensor))) / 2
        rounds.append((all_of_them / (one * ranks), one, all_of_them))
        print(f"one rank's step: {one * 1e3:.1f} ms; {ranks} ranks simulated: {all_of_them:.2f} s", file=sys.stderr)
    ratio, one, all_of_them = sorted(rounds)[ROUNDS // 2]
    print(f"{ranks} ranks simulated take {ratio:.2f} of the sum of their compute")
    figures = {"ranks": ranks, "rank_ms": round(one * 1e3, 2), "simulated_s": round(all_of_them, 3)}
    ratios = [round(found, 3) for found, _, _ in rounds]
    print(json.dumps({**figures, "ratios": ratios, "ratio": round(ratio, 3), "budget": BUDGET}))
    return 0 if chosen.report_only or ratio <= BUDGET else 1


if __name__ == "__main__":
    sys.exit(main())
