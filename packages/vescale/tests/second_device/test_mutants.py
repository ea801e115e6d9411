"""A handful of mutants of the engine against one training on the second device; all with
`python -m mutants` (tools/mutants)."""

import pytest

from mutants import hunt
from mutants.grammar import HELPER, KINDS, changed, places_of
from sweeps.training_cases import CASES
from sweeps.training_verdict import wanted_of
from vescale_testkit import in_turns, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

TRAININGS = ("llama-zero2-clip", "llama-1f1b-clip", "llama-tp-sp", "gpt-dropout-zero3", "mixtral-experts")
MUTANTS, DRAW = 4, 332

SOURCE = """
import torch

class Sender:
    def send(self, group, tensor, peer):
        flat = tensor.contiguous()
        work = group.send([flat], peer)
        out = torch.empty(4, device=flat.device)
        work.wait()
        for one in self.others:
            one.send(group, out, peer)
        return out.sum()
"""


def test_places_are_found_by_syntax():
    found = [(place.kind, place.text) for place in places_of("file.py", SOURCE)]
    assert ("clone", "tensor.contiguous()") in found and ("write", "group.send([flat], peer)") in found
    assert ("wait", "work.wait()") in found and ("skip", "work.wait()") in found
    assert ("host", "torch.empty(4, device=flat.device)") in found and ("order", "for one in self.others:") in found
    assert ("tag", "one.send(group, out, peer)") in found and ("item", "return out.sum()") in found
    assert {kind for kind, _ in found} <= set(KINDS)


def test_one_place_is_changed_and_nothing_else():
    import ast

    for place in places_of("file.py", SOURCE):
        text = ast.unparse(changed(SOURCE, only=place.number))
        assert f"{HELPER}({place.number}, " in text and text.count("class Sender") == 1, place
    assert ast.unparse(changed(SOURCE, only=-1)) == ast.unparse(ast.parse(SOURCE))


@in_turns(3)
def test_a_handful_of_mutants_is_caught():
    case = CASES[TRAININGS[DRAW % len(TRAININGS)]]
    seen = hunt.survey(case)
    assert isinstance(seen, hunt.Seen), seen
    chances = hunt.chances(hunt.all_places(), {case.name: seen})
    chosen = hunt.drawn(chances, 1, seed=DRAW)
    chosen = [chosen[(DRAW + at) % len(chosen)] for at in range(min(MUTANTS, len(chosen)))]
    wanted = wanted_of(case)
    found = [hunt.verdict(place, case, wanted, seen, which=DRAW) for place, _ in chosen]
    missed = [one.as_json() for one in found if not one.caught and not one.is_equivalent]
    assert not missed, missed
    assert any(one.caught for one in found)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_places_in_the_engine(kind):
    least = 8 if kind == "stream" else 20
    assert sum(place.kind == kind for places in hunt.all_places().values() for place in places) > least
