"""The same training as a script over veScale's public names: nobody is bound to a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .config import Config
from .tokens import rows_of, tokenizer_of


def script_of(config: Config) -> str:
    """Returns a program of under 80 lines that trains as `vescale train` does, from the tokens that are made now.

    Evaluation, LoRA and trackers are left to whoever goes on with it.
    """
    name = config.model.name
    tokenizer = tokenizer_of(config.data, None if name is None or ":" in name else name)
    tokens = rows_of(config.data, tokenizer, None)
    return "\n".join(_lines(config, tokens)) + "\n"


def _lines(config: Config, rows: Any) -> Iterator[str]:
    model, data, training, optimizer, plan = config.model, config.data, config.training, config.optimizer, config.plan
    of_ones_own = model.name is not None and ":" in model.name
    yield '"""Made by `vescale train --script`. Start it with python, or with torchrun."""'
    yield ""
    yield "import math\nimport os\n"
    yield "import numpy as np\nimport torch"
    if not of_ones_own:
        yield "from transformers import AutoConfig, AutoModelForCausalLM"
    yield "\nimport vescale"
    if of_ones_own:
        module, _, function = str(model.name).partition(":")
        yield f"from {module} import {function}"
    yield f"\nSTEPS, ROWS, LENGTH = {training.steps}, {training.batch}, {data.length}"
    yield f"FOLDER = {config.checkpoint.folder!r}\n\n"
    yield from _dataset(rows)
    yield "\n\ndef share(step):"
    if optimizer.warmup:
        yield f"    if step < {optimizer.warmup}:\n        return (step + 1) / {optimizer.warmup + 1}"
    yield f"    gone = (step - {optimizer.warmup}) / {max(training.steps - optimizer.warmup, 1)}"
    falls = {"cosine": "(1 + math.cos(math.pi * gone)) / 2", "linear": "(1 - gone)", "constant": "1.0"}
    yield f"    return {optimizer.floor} + {1 - optimizer.floor} * {falls[optimizer.schedule]}\n\n"
    yield f"torch.manual_seed({training.seed})"
    if plan.reproducible:
        yield "vescale.reproducible().__enter__()"
    if not of_ones_own:
        made = f"for_model({model.type!r}" if model.type is not None else f"from_pretrained({model.name!r}"
        yield f"config = AutoConfig.{made}{_arguments(model.config)})\nconfig.use_cache = False"
    yield "with vescale.deferred_init():"
    yield (
        f"    model = {function}({_arguments(model.config)[2:]})"
        if of_ones_own
        else ("    model = AutoModelForCausalLM.from_config(config)")
    )
    if plan.file is not None:
        yield f"plan = vescale.Plan.from_json(open({plan.file!r}).read())"
    else:
        precision = "" if plan.precision == "float32" else f", precision=vescale.Precision(torch.{plan.precision})"
        yield 'ranks = int(os.environ.get("WORLD_SIZE", 1))'
        yield f"pins = {{'pin': {plan.pin!r}, 'hardware': {plan.hardware!r}}}"
        part = "ROWS" if training.accumulate == 1 else f"ROWS // {training.accumulate}"
        yield f"plan = vescale.generate_plan(model, world_size=ranks, batch={part}, seq=LENGTH, **pins{precision})"
    if training.accumulate > 1:
        yield f"plan = plan.override(accumulation=plan.accumulation * {training.accumulate})"
    given = f"lr={optimizer.lr}{_arguments(optimizer.options)}"
    yield f"make = lambda parameters: torch.optim.{optimizer.name}(parameters, {given})"
    yield f"model, optimizer = vescale.parallelize(plan, model, make, mode={plan.mode!r})"
    yield "rate = torch.optim.lr_scheduler.LambdaLR(optimizer, share)"
    count = round(len(rows) * data.held_out) if data.held_out else 0
    yield f"data = Rows({len(rows) - count})"
    yield "loader = torch.utils.data.DataLoader(data, ROWS, shuffle=True, drop_last=True)"
    yield "loader = vescale.loader(loader, plan, parts=False)"
    yield 'state = {"plan": plan, "model": model, "optimizer": optimizer, "rate": rate, "loader": loader}'
    yield 'state |= {"random": {"cpu": torch.get_rng_state()}, "step": 0}'
    yield "if (latest := vescale.latest(FOLDER)) is not None:"
    yield "    vescale.load(FOLDER, state, step=latest)"
    yield '    torch.set_rng_state(state["random"]["cpu"])'
    if model.name is not None and model.weights and not of_ones_own:
        yield f"else:\n    vescale.load({model.name!r}, {{'model': model}})"
    yield "device = next(model.parameters()).device\n"
    yield "while state['step'] < STEPS:\n    for batch in loader:"
    yield "        batch = {name: one.to(device) for name, one in batch.items()}"
    yield "        losses, count = [], lambda batch: int((batch['labels'][:, 1:] >= 0).sum())"
    yield "        for part in plan.parts(batch, model):"
    yield "            losses.append(model(**part).loss * (count(part) / count(batch)))"
    yield "            losses[-1].backward()"
    if optimizer.clip is not None:
        yield f"        torch.nn.utils.clip_grad_norm_(model.parameters(), {optimizer.clip})"
    yield "        optimizer.step()\n        optimizer.zero_grad()\n        rate.step()"
    yield "        step = state['step'] = state['step'] + 1\n        print(step, sum(losses).item())"
    yield f"        if step % {config.checkpoint.every} == 0 or step == STEPS:"
    yield "            state['random'] = {'cpu': torch.get_rng_state()}"
    keep = f"retention=vescale.Retention(last={config.checkpoint.keep})"
    yield f"            vescale.save(FOLDER, state, overwrite=True, {keep})"
    yield "        if step == STEPS:\n            break"
    if config.checkpoint.export is not None:
        yield f"vescale.export_huggingface({config.checkpoint.export!r}, model)"


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
    yield f'        row = {{"input_ids": tokens, "labels": {labels}}}'
    if rows.end is not None:
        yield "        places = torch.arange(LENGTH)"
        yield f"        begins = torch.cat([places.new_zeros(1), (places + 1).where(tokens == {rows.end}, 0)[:-1]])"
        yield '        row["position_ids"] = places - begins.cummax(0).values'
    yield "        return row"


def _opened(array: Any) -> str:
    path = str(array.filename)
    if path.endswith(".npy"):
        return f"np.load({path!r}, mmap_mode='r')"
    return f"np.memmap({path!r}, np.{array.dtype}, 'r')"


def _arguments(given: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in given.items())
