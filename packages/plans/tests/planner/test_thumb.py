"""What the field knows by rule of thumb, held against the planner's choices on problems of every size."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from vescale_plans.search import InfeasibleError, Request, hardware_of, rank, sample_of, structure_of
from vescale_plans.search.decision import against, places
from vescale_plans.search.ranking import MARGIN
from vescale_testkit import slice_of

SIZES = {"8B": (32, 4096, 32, 14336), "70B": (80, 8192, 64, 28672), "mixture": (32, 4096, 32, 14336)}
PROBLEMS = list(product(SIZES, (8, 16, 64, 256, 512), (1, 4), ("a100", "h100")))
"""(model, ranks, rows of each rank, hardware), 60 of them, at 4096 positions in bfloat16."""


@cache
def structure(name):
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    layers, hidden, heads, inner = SIZES[name]
    sizes = {
        "vocab_size": 32000, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8,
    }  # fmt: skip
    with torch.device("meta"):
        mixture = name == "mixture"
        model = MixtralForCausalLM(MixtralConfig(**sizes)) if mixture else LlamaForCausalLM(LlamaConfig(**sizes))
    return structure_of(model, sample_of(model))


def asked(name, ranks, rows, hardware, **more):
    device = hardware_of(hardware)
    limit = MARGIN * device.memory
    return Request(structure(name), ranks, ranks * rows, 4096, device, limit, dtype=torch.bfloat16, **more)


@pytest.mark.parametrize(("name", "ranks", "rows", "hardware"), slice_of(PROBLEMS, 6))
def test_rules_of_thumb(name, ranks, rows, hardware):
    request = asked(name, ranks, rows, hardware)
    try:
        best = rank(request)[0]
    except InfeasibleError:
        assert name != "8B" or ranks < 8  # 16 bytes of each of 8B numbers fit on 8 GPUs of 80 GB
        return
    one, node = best.candidate, request.hardware.node
    said = dict(places(request, one))
    if one.tp > 1:
        inside = "inside a node" in said["axis tp"]
        assert inside == (node % one.tp == 0)
        assert inside or _loses(request, best, {"tp": node})
    if one.ep > 1:
        assert one.ep * one.tp <= node or _loses(request, best, {"ep": node // one.tp})
    if one.pp > 1 and ranks > node:
        assert "crosses" in said["axis pp"] or _loses(request, best, {"pp": ranks // node})
    for axis in ("tp", "pp"):  # model parallelism no larger than it must be, unless it wins by price
        for degree in (2, 4):
            if getattr(one, axis) >= degree:
                assert _loses(request, best, {axis: getattr(one, axis) // degree})
    if name == "mixture" and one.tp > 1 and one.ep == 1:
        assert _loses(request, best, {"tp": 1})
        assert _loses(request, best, {"tp": 1, "ep": min(one.tp, 8)})


def _loses(request, best, pin):
    """Whether the page says so: that it does not fit, cannot be had, or by how much it is slower, and where."""
    try:
        other = against(request, best, pin)
    except InfeasibleError as error:
        return "generate_plan" in str(error)
    text = str(other)
    if not other.fits:
        return text.endswith("it does not fit") and "missing" in text
    slower = other.other.cost.total >= best.cost.total * (1 - 1e-9)
    return slower and text.endswith("it fits, and is no faster") and any(lost > 0 for _, lost in other.losses)


def test_a_border_is_priced_wherever_it_is():
    """Nodes of six: groups of two and three lie inside, of four some straddle."""
    request = asked("8B", 24, 1, "h100")
    request = replace(request, hardware=replace(request.hardware, node=6))
    crossing = {tp: request.hardware.crosses(1, tp) for tp in (2, 3, 4, 6, 8)}
    assert crossing == {2: False, 3: False, 4: True, 6: False, 8: True}
    rack = replace(request, hardware=hardware_of("gb200"))
    assert not rack.hardware.crosses(1, 8)
    assert not rack.hardware.crosses(8, 9)  # 72 in all
    assert rack.hardware.crosses(1, 16)  # the fifth group of sixteen straddles
