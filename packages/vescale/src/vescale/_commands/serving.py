"""Folders that others serve a model from: written beside its configuration, and checked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vescale_checkpoint import MismatchError, tools

from ..pretrained import load, places_of

_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf")
_FLOATS = ("float32", "bfloat16", "float16")
_ROWS, _POSITIONS = 2, 16


def copy_what_is_beside(source: Path, folder: str) -> None:
    """Copies configurations, the tokenizer, and whatever else lies beside weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copy(file, folder)


def checked(folder: Path, against: str | None, step: int | None, key: str) -> Iterator[tuple[bool, str]]:
    """Yields what is found of an export: whether it is as it should be, and a line that says it."""
    if not folder.is_dir():  # transformers would look for it on the hub
        yield False, f"transformers does not load it: {folder} is no folder"
        return
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
        model, told = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # of whatever type: transformers checks a folder in many ways
        yield False, f"transformers does not load it: {(str(error).splitlines() or [type(error).__name__])[0]}"
        return
    odd = [f"{len(told[name])} {name.replace('_', ' ')}" for name in told if told[name]]
    yield not odd, f"transformers loads it into {type(model).__name__}{': ' if odd else ''}{', '.join(odd)}"
    held = tools.exported(folder)
    tied, places = getattr(model, "all_tied_weights_keys", None) or {}, places_of(model)
    names = {
        published
        for name in model.state_dict() if name not in tied
        for published in [place[0] for place in places.get(name, ())] or [name]
    }  # fmt: skip
    apart = sorted(names ^ held.keys())
    said = f": not {', '.join(apart[:3])}{', ...' if len(apart) > 3 else ''}" if apart else ", which vLLM reads"
    yield not apart, f"{len(held)} tensors under the names that transformers publishes{said}"
    other = sorted({*held.values()} - {str(config.dtype).removeprefix("torch.")})
    said = f", and files hold {', '.join(other)}: a server converts them" if other else ", as the files hold it"
    yield True, f"config.json says {config.dtype}{said}"
    missing = [name for name in ("generation_config.json", "tokenizer_config.json") if not (folder / name).exists()]
    yield True, f"beside it: {'no ' + ', no '.join(missing) if missing else 'tokenizer and generation config'}"
    if against is not None:
        narrow = min((getattr(torch, name) for name in _FLOATS if name in held.values()), key=_digits)
        yield _same_logits(model, kind, folder, against, step, key, narrow)


def _digits(dtype: torch.dtype) -> float:
    return -torch.finfo(dtype).eps


@torch.no_grad()
def _same_logits(
    model: Any, kind: Any, folder: Path, against: str, step: int | None, key: str, narrow: torch.dtype
) -> tuple[bool, str]:
    """Compares the logits of random tokens with those of the step that was exported, in float32."""
    trained = kind.from_pretrained(folder, dtype=torch.float32)
    try:
        load(against, {key: trained}, step=step, cast=[f"{name}->float32" for name in _FLOATS])
    except MismatchError as error:
        return False, f"{against} is not of this model: {error.rule}"
    rows = torch.randint(model.config.vocab_size, (_ROWS, _POSITIONS), generator=torch.Generator().manual_seed(0))
    found, wanted = (one.eval()(input_ids=rows).logits for one in (model, trained))
    far, most = (found - wanted).abs().max().item(), wanted.abs().max().item()
    alike = f"{(found.argmax(-1) == wanted.argmax(-1)).float().mean().item():.0%} of next tokens alike"
    if far == 0:
        return True, f"logits are those of {against} to the bit"
    near = narrow != torch.float32 and far <= 8 * torch.finfo(narrow).eps * most
    why = f", as {str(narrow).removeprefix('torch.')} rounds" if near else ""
    return near, f"logits differ from those of {against} by {far:.2g} of {most:.2g}, {alike}{why}"
