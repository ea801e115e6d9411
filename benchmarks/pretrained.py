"""Published weights read into shards: `vescale.from_pretrained` beside transformers' own, on the same files.

    python benchmarks/pretrained.py                  # TP 2 and FSDP 2, in turns
    python benchmarks/pretrained.py --rounds 5

A Llama of 170 million parameters in bfloat16, in files of 100 MB that lie in the page cache. Every run starts two new
processes; imports, and the start of the process group, are not counted. veScale is given a plan, or transformers'
`DistributedConfig`, whose plan it finds by probing the model (which takes the same time for a model of any size).

- `cpu ms` is from the call until every value has been read once, of a rank and all its threads; `over` is its ratio to
  transformers', the median of the rounds. (transformers' tensors are mapped files, read when they are used.)
- `peak` is the largest anonymous memory of a rank less what it was before, over the bytes of its shards. Mapped files
  are no anonymous memory: transformers' unsplit shards take none.
- `read` is the bytes of the files that a rank of veScale reads, over its shards'. (transformers maps whole files.)

On a CPU veScale takes longer: it copies into its shards what transformers leaves in the mapped files, and checks model
and plan, which takes the same time for a model of any size. Status 1 if a peak of veScale is more than 1.2. The last
line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

PEAK = 1.2
SIZES = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 16384, "max_position_embeddings": 2048,
}  # fmt: skip
CASES = {"tp 2": {"tp_size": 2}, "fsdp 2": {"fsdp_size": 2}}
LIBRARIES = ("transformers", "plan", "config")


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


class Peak:
    """The most anonymous memory within the block, looked at every 2 ms."""

    def __enter__(self) -> "Peak":
        self.begun = self.most = anonymous()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, anonymous())

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self.most = max(self.most, anonymous())


def read(library: str, case: str, folder: str) -> dict[str, float]:
    """What a rank takes to read its shards."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    import vescale
    import vescale_checkpoint
    from vescale import pretrained

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config, told, load = DistributedConfig(**CASES[case]), [], vescale_checkpoint.load
    vescale_checkpoint.load = lambda *given, **how: told.append(load(*given, **how)) or told[-1]
    with torch.device("meta"):
        shapes = LlamaForCausalLM(LlamaConfig(**SIZES))
    plan = vescale.plan_from_config(config, shapes)
    dist.barrier()
    with Peak() as peak:
        began = time.process_time()
        if library == "transformers":
            model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
        else:
            model, _ = pretrained.from_pretrained(folder, plan if library == "plan" else config)
        shards = [one.to_local() if hasattr(one, "to_local") else one for one in model.parameters()]
        assert all(one.detach().view(torch.int16).max() > 0 for one in shards if one.numel())
        seconds = time.process_time() - began
    size = sum(one.nbytes for one in shards)
    found = {"ms": 1e3 * seconds, "peak": (peak.most - peak.begun) / size}
    return found | ({"read": told[0].bytes_read / size} if told else {})


def run(*given: str) -> list[dict[str, float]]:
    """What two new processes take."""
    from vescale_testkit import free_port

    port = free_port()
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", *given], env=os.environ | told | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    return [json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.rank:
        print(json.dumps(read(*given.rank)))
        return 0
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(folder, max_shard_size="100MB")
        cells = [(case, library) for case in CASES for library in LIBRARIES]
        found = {cell: [run(cell[1], cell[0], folder) for _ in range(given.rounds)] for cell in cells}
    line, missed = {}, False
    print(f"{'':8} {'library':16} {'cpu ms':>7} {'over':>6} {'peak':>6} {'read':>6}")
    for (case, library), runs in found.items():
        slowest = [max(one["ms"] for one in ranks) for ranks in runs]
        others = [max(one["ms"] for one in ranks) for ranks in found[case, "transformers"]]
        over = statistics.median(mine / other for mine, other in zip(slowest, others))
        peak = max(one["peak"] for ranks in runs for one in ranks)
        got = max(one.get("read", 0.0) for ranks in runs for one in ranks)
        name = library if library == "transformers" else f"veScale, {library}"
        print(f"{case:8} {name:16} {statistics.median(slowest):7.0f} {over:6.2f} {peak:6.2f} {got or '-':>6.4}")
        missed |= library != "transformers" and peak > PEAK
        line[f"{case}, {library}"] = {"cpu ms": statistics.median(slowest), "over": over, "peak": peak, "read": got}
    print(json.dumps(line))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
