"""The same training as a script over veScale's public names: nobody is bound to a configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from .config import Config, ConfigError
from .tokens import rows_of, tokenizer_of

_GENERATORS = """

class Generators:
    def state_dict(self):
        return {"cpu": torch.get_rng_state()} | \
({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})

    def load_state_dict(self, states):
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


""".splitlines()


def script_of(config: Config) -> str:
    """Returns a program of under 80 lines that trains as `vescale train` does, from the tokens that are made now.

    Evaluation, trackers and steps in memory (`protect`) are left to whoever goes on with it. Raises ConfigError for
    LoRA, which the script does not have.
    """
    if config.model.lora:
        raise ConfigError("vescale train", "--script has no LoRA", (), [("without model.lora", "trains all weights")])
    tokens = rows_of(config.data, tokenizer_of(config.data, config.model.published), None)
    return "\n".join(_lines(config, tokens)) + "\n"


def _lines(config: Config, rows: Any) -> Iterator[str]:
    model, data, training, plan = config.model, config.data, config.training, config.plan
    of_ones_own, weights = model.is_function, model.published if model.weights else None
    yield '"""Made by `vescale train --script`. Start it with python, or with torchrun."""'
    yield "import math\nimport os\nfrom itertools import chain, repeat\n"
    yield "import numpy as np\nimport torch"
    if weights is not None and not os.path.isdir(weights):
        yield "from huggingface_hub import snapshot_download"
    if of_ones_own:
        module, _, function = str(model.name).partition(":")
        yield f"from {module} import {function}"
    else:
        yield "from transformers import AutoConfig, AutoModelForCausalLM"
    yield f"\nimport vescale\n\nSTEPS, ROWS, LENGTH = {training.steps}, {training.batch}, {data.length}"
    yield f"FOLDER = {config.checkpoint.folder!r}\n\n"
    yield from _dataset(rows)
    yield from _GENERATORS
    yield f"torch.manual_seed({training.seed})"
    if plan.reproducible:
        yield "vescale.reproducible().__enter__()"
    if of_ones_own:
        made = f"{function}({_arguments(model.config)[2:]})"
    else:
        named = f"for_model({model.type!r}" if model.type is not None else f"from_pretrained({model.name!r}"
        yield f"config = AutoConfig.{named}{_arguments({**model.config, 'use_cache': False})})"
        made = "AutoModelForCausalLM.from_config(config)"
    yield f"with vescale.deferred_init():\n    model = {made}"
    yield from _planned(config)
    yield f"rate = torch.optim.lr_scheduler.LambdaLR(optimizer, {_share(config)})"
    count = round(len(rows) * data.held_out) if data.held_out else 0
    yield f"loader = torch.utils.data.DataLoader(Rows({len(rows) - count}), ROWS, shuffle=True, drop_last=True)"
    yield "loader = vescale.loader(loader, plan, parts=False)"
    yield "state = {'plan': plan, 'model': model, 'optimizer': optimizer, 'rate': rate, 'loader': loader, " + (
        "'random': Generators(), 'step': 0}"
    )
    yield "if (latest := vescale.latest(FOLDER)) is not None:\n    vescale.load(FOLDER, state, step=latest)"
    if weights is not None:
        folder = repr(weights) if os.path.isdir(weights) else f"snapshot_download({weights!r})"
        yield f"else:\n    vescale.load({folder}, {{'model': model}})"
    yield from _loop(config)
    if config.checkpoint.export is not None:
        yield f"vescale.export_huggingface({config.checkpoint.export!r}, model)"


def _planned(config: Config) -> Iterator[str]:
    """The plan, the parallel model and its optimizer."""
    training, optimizer, plan = config.training, config.optimizer, config.plan
    if plan.file is not None:
        yield f"file = {plan.file!r}.replace('{{ranks}}', os.environ.get('WORLD_SIZE', '1'))"
        yield "plan = vescale.Plan.from_json(open(file).read())"
    else:
        rows = "ROWS" if training.accumulate == 1 else f"ROWS // {training.accumulate}"
        precision = "" if plan.precision == "float32" else f", precision=vescale.Precision(torch.{plan.precision})"
        yield f"asked = {{'batch': {rows}, 'seq': LENGTH, 'pin': {plan.settings!r}, 'hardware': {plan.hardware!r}}}"
        yield "asked['world_size'] = int(os.environ.get('WORLD_SIZE', 1))"
        yield f"plan = vescale.generate_plan(model, **asked{precision})"
    if training.accumulate > 1:
        yield f"plan = plan.override(accumulation=plan.accumulation * {training.accumulate})"
    given = f"lr={optimizer.lr}{_arguments(optimizer.options)}"
    yield f"make = lambda parameters: torch.optim.{optimizer.name}(parameters, {given})"
    yield f"model, optimizer = vescale.parallelize(plan, model, make, mode={plan.mode!r})"


def _share(config: Config) -> str:
    """The learning rate of a step, as a share of the highest."""
    optimizer = config.optimizer
    gone = f"(step - {optimizer.warmup}) / {max(config.training.steps - optimizer.warmup, 1)}"
    falls = {"cosine": f"(1 + math.cos(math.pi * ({gone}))) / 2", "linear": f"(1 - {gone})", "constant": "1.0"}
    rises = f"(step + 1) / {optimizer.warmup + 1} if step < {optimizer.warmup} else " if optimizer.warmup else ""
    return f"lambda step: {rises}{optimizer.floor} + {1 - optimizer.floor} * {falls[optimizer.schedule]}"


def _loop(config: Config) -> Iterator[str]:
    """The training loop, which saves as `vescale train` does."""
    yield "device = next(model.parameters()).device"
    yield "count = lambda batch: int((batch['labels'][:, 1:] >= 0).sum())"
    yield "for step, batch in zip(range(state['step'] + 1, STEPS + 1), chain.from_iterable(repeat(loader))):"
    yield "    losses = []\n    for part in plan.parts(batch, model):"
    yield "        loss = model(**{name: one.to(device) for name, one in part.items()}).loss"
    yield "        losses.append(loss * (count(part) / count(batch)))\n        losses[-1].backward()"
    if config.optimizer.clip is not None:
        yield f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {config.optimizer.clip})"
    yield "    optimizer.step()\n    optimizer.zero_grad()\n    rate.step()"
    yield "    state['step'] = step\n    print(step, sum(losses).item())"
    yield f"    if step % {config.checkpoint.every} == 0 or step == STEPS:"
    keep = f"retention=vescale.Retention(last={config.checkpoint.keep})"
    yield f"        vescale.save(FOLDER, state, overwrite=True, {keep})"


def _dataset(rows: Any) -> Iterator[str]:
    """The class of packed rows, over the files of the cache."""
    yield "class Rows(torch.utils.data.Dataset):"
    yield "    def __init__(self, count):\n        self.count = count"
    yield f"        self.tokens = {_opened(rows.tokens)}"
    if rows.counted is not None:
        yield f"        self.counted = {_opened(rows.counted)}"
    yield "\n    def __len__(self):\n        return self.count"
    yield "\n    def __getitem__(self, index):\n        at = slice(index * LENGTH, (index + 1) * LENGTH)"
    yield "        tokens = torch.from_numpy(self.tokens[at].astype(np.int64))"
    labels = "tokens"
    if rows.counted is not None:
        labels = "tokens.where(torch.from_numpy(self.counted[at].astype(bool)), -100)"
    row = f'"input_ids": tokens, "labels": {labels}'
    if rows.end is not None:
        yield "        places = torch.arange(LENGTH)"
        yield f"        begins = torch.cat([places.new_zeros(1), (places + 1).where(tokens == {rows.end}, 0)[:-1]])"
        row += ', "position_ids": places - begins.cummax(0).values'
    yield f"        return {{{row}}}"


def _opened(array: Any) -> str:
    path = str(array.filename)
    if path.endswith(".npy"):
        return f"np.load({path!r}, mmap_mode='r')"
    return f"np.memmap({path!r}, np.{array.dtype}, 'r')"


def _arguments(given: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in given.items())
