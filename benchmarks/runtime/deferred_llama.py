"""One rank's share of a Llama of 70 billion parameters, built under deferred_init on a fake mesh of 64.

    python benchmarks/runtime/deferred_llama.py              # both streams, and buffers, each in a process of its own
    python benchmarks/runtime/deferred_llama.py philox       # one of them

Weights are cut 8-fold by tensor parallelism and 8-fold over the data axis, in bfloat16;
under `buffers` 64-fold by ZeRO-3, into its flat buffers, from the philox stream.
`build_s` is the model's own code, with its initialisation, recorded; `materialize_s` makes the shards.
Peak memory is the process's largest resident size, less what it was before the model
was built. Status 1 when the philox stream takes 2 minutes or more, or the peak is more
than 1.25 times the shard. The last line is one JSON object.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

LIMIT_S, PEAK = 120, 1.25
WAYS = ("philox", "torch", "buffers")
SIZES = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def plan():
    import vescale
    from vescale import Shard

    rows, columns = {"tp": Shard(1), "dp": Shard(0)}, {"tp": Shard(0), "dp": Shard(0)}
    return vescale.Plan(
        mesh={"dp": 8, "tp": 8},
        parameters={"*.o_proj.weight": rows, "*.down_proj.weight": rows, "*norm.weight": {}, "*": columns},
    )


def zero3():
    import vescale

    return vescale.Plan(mesh={"dp": 64}, data_axis="dp", zero=3, parameters={"*": {}})


def build(way: str) -> dict:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import vescale
    from vescale_testkit import fake_world

    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    vescale.manual_seed(0, stream="torch" if way == "torch" else "philox")
    with vescale.deferred_init():
        model = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), dtype=torch.bfloat16)
    built = time.perf_counter()
    with fake_world(64):
        vescale.parallelize(zero3() if way == "buffers" else plan(), model)
        made = time.perf_counter()
        shard = sum(parameter.to_local().nbytes for parameter in model.parameters())
        elements = sum(parameter.numel() for parameter in model.parameters())
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {
        "way": way,
        "parameters": elements,
        "build_s": round(built - began, 1),
        "materialize_s": round(made - built, 1),
        "shard_bytes": shard,
        "peak_bytes": peak,
        "peak_over_shard": round(peak / shard, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", nargs="?", choices=WAYS)
    way = parser.parse_args().way
    if way:
        print(json.dumps(build(way)))
        return 0
    found = {}
    for way in WAYS:
        done = subprocess.run([sys.executable, __file__, way], check=True, stdout=subprocess.PIPE, text=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
        print(found[way])
    philox = found["philox"]
    holds = philox["build_s"] + philox["materialize_s"] < LIMIT_S and all(
        one["peak_over_shard"] <= PEAK for one in found.values()
    )
    print(json.dumps({"limit_s": LIMIT_S, "limit_peak_over_shard": PEAK, "holds": holds, **found}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
