"""The training of `vescale train` on every rank: the loop of a single device, which goes on from its checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import vescale

from .config import Config, ConfigError
from .model import build, weights_of
from .planning import plan_of
from .stop import Stop, say
from .tokens import rows_of, tokenizer_of


def train(config: Config) -> bool:
    """Trains to the last step, or until it is asked to stop. Returns whether it came to the last step.

    Call it on every rank of torchrun, or in a process of its own. It goes on from the newest step in the checkpoint's
    folder, on any number of ranks and under any plan.
    """
    torch.manual_seed(config.training.seed)
    tokenizer = tokenizer_of(config.data, config.model.published)
    with vescale.reproducible() if config.plan.reproducible else contextlib.nullcontext():
        return _Run(config, tokenizer).to_the_end()


class _Run:
    """A model with its plan, optimizer and data, at some step."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        training, self.folder = config.training, Path(config.checkpoint.folder)
        model = build(config.model)
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
        rows, held_out = rows_of(config.data, tokenizer, vocabulary).parted(config.data.held_out)
        size = training.batch
        for what, some in (("train on", rows), *((("evaluate", held_out),) if config.evaluation.every else ())):
            if len(some) < size:
                rule = f"there are {len(some)} rows to {what}, and a batch has {size}"
                raise ConfigError("vescale train", rule, (), [("length = ...", "shorter rows are more")])
        plan = plan_of(config, model, int(os.environ.get("WORLD_SIZE", 1)))
        self.model, self.optimizer = vescale.parallelize(plan, model, self.make_optimizer, mode=config.plan.mode)
        self.rate = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.share_of_rate)
        whole = {"parts": False} if plan.accumulation > 1 else {}  # what is split by rows is whole on every rank
        load = lambda rows, **how: vescale.loader(DataLoader(rows, size, drop_last=True, **how), plan, **whole)
        self.loader, self.held_out = load(rows, shuffle=True), load(held_out) if config.evaluation.every else None
        self.state = {
            "plan": plan, "model": self.model, "optimizer": self.optimizer, "rate": self.rate, "loader": self.loader,
            "random": Generators(), "step": 0,
        }  # fmt: skip
        self.device = next(self.model.parameters()).device
        self.latest = vescale.latest(self.folder)
        if self.latest is not None:
            vescale.load(self.folder, self.state, step=self.latest)
        elif (weights := weights_of(config.model)) is not None:
            vescale.load(weights, {"model": self.model})
        export = config.checkpoint.export
        self.exports = export is not None and not os.path.exists(export)
        if export is not None and not self.exports and self.state["step"] < training.steps:
            rule = f"checkpoint.export = {export!r} exists, and an export replaces nothing"
            raise ConfigError("vescale train", rule, (), [("export = ...", "a new folder"), (f"rm -r {export}", "")])

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        config = self.config.optimizer
        kind = getattr(torch.optim, config.name, None)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            rule = f"optimizer.name = {config.name!r} is no optimizer of torch.optim"
            raise ConfigError("vescale train", rule, (), [('name = "AdamW"', "")])
        try:
            return kind(parameters, lr=config.lr, **config.options)
        except (TypeError, ValueError) as error:
            rule = f"optimizer.options do not fit {config.name}: {error}"
            raise ConfigError("vescale train", rule, (), ()) from error

    def share_of_rate(self, step: int) -> float:
        """The learning rate of a step, as a share of the highest."""
        config = self.config.optimizer
        if step < config.warmup:
            return (step + 1) / (config.warmup + 1)
        gone = (step - config.warmup) / max(self.config.training.steps - config.warmup, 1)
        falls = {"cosine": (1 + math.cos(math.pi * gone)) / 2, "linear": 1 - gone, "constant": 1.0}
        return config.floor + (1 - config.floor) * falls[config.schedule]

    def to_the_end(self) -> bool:
        config, steps = self.config, self.config.training.steps
        begun = self.state["step"]
        say(f"step {begun} of {steps} in {self.folder}" + ("" if self.latest is None else self.came_back()))
        kept = config.checkpoint.protect
        keeping = vescale.protect(self.folder, self.state, every=kept) if kept else contextlib.nullcontext()
        with Stop(self.folder) as stop, self.meter() as meter, keeping as protected:
            batches = self.batches()
            while self.state["step"] < steps and not stop.is_asked:
                loss = self.step(batches)
                meter.step(loss)
                step = self.state["step"] = self.state["step"] + 1
                stop.ask()
                if step % config.checkpoint.every == 0 or step == steps:
                    self.save()
                elif protected is not None:
                    protected.step()
                if config.evaluation.every and (step % config.evaluation.every == 0 or step == steps):
                    self.evaluate(step)
            if stop.is_asked and self.state["step"] % config.checkpoint.every and self.state["step"] != steps:
                self.save()
                stop.tell_time()
        if self.state["step"] == steps and self.exports:
            also = [self.tokenizer] if hasattr(self.tokenizer, "save_pretrained") else []
            vescale.export_huggingface(config.checkpoint.export, self.model, also=also)
            say(f"exported to {config.checkpoint.export}")
        return self.state["step"] == steps

    def came_back(self) -> str:
        """Returns what of a run that goes on was lost, on which ranks it does, and how long it stood."""
        told = vescale.JSONLines(self.folder / "metrics.jsonl")
        found, step, last = ", from its checkpoint", self.state["step"], told.last()
        if last is not None and last > step:
            found += f"; steps {step + 1} to {last} are computed again"
        mesh = " x ".join(f"{name} {size}" for name, size in self.state["plan"].mesh.items())
        stood = "" if last is None else f", {time.time() - told.path.stat().st_mtime:.0f} s after the last step"
        return f"{found}; on {mesh}{stood}"

    def step(self, batches: Iterator[dict[str, Tensor]]) -> Tensor:
        """One step of the optimizer. Returns its loss: the mean over the tokens that count."""
        losses = []
        for loss in self.losses(next(batches)):
            loss.backward()
            losses.append(loss.detach())
        if self.config.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rate.step()
        return sum(losses[1:], losses[0])

    def losses(self, batch: dict[str, Tensor]) -> Iterator[Tensor]:
        """Yields the losses of the parts that the plan makes of a batch, which add up to the batch's."""
        plan = self.state["plan"]
        for part in plan.parts(batch, self.model):
            loss = self.model(**part).loss
            yield loss if plan.accumulation == 1 else loss * (_counted(part) / _counted(batch))

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Epoch after epoch."""
        while True:
            for batch in self.loader:
                yield self.placed(batch)

    def placed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: one.to(self.device) for name, one in batch.items()}

    def save(self) -> None:
        keep = vescale.Retention(last=self.config.checkpoint.keep)
        vescale.save(self.folder, self.state, overwrite=True, retention=keep)

    def evaluate(self, step: int) -> None:
        """Tells the mean loss of the rows that are held out; training's random numbers are left as they are."""
        config, random = self.config.evaluation, self.state["random"].state_dict()
        self.model.eval()
        with torch.no_grad():
            batches = islice(self.held_out, config.batches)
            losses = [sum(map(float, self.losses(self.placed(batch)))) for batch in batches]
            say(f"step {step}  loss of rows held out {sum(losses) / len(losses):.4f}")
            if config.prompt is not None:
                tokens = torch.tensor(self.tokenizer([config.prompt])["input_ids"], device=self.device)
                found = self.model.generate(input_ids=tokens, max_new_tokens=config.tokens, do_sample=False)
                say(f"step {step}  {self.tokenizer.decode(found[0].tolist(), skip_special_tokens=True)!r}")
        self.model.train()
        self.state["random"].load_state_dict(random)

    def meter(self) -> Any:
        config = self.config.log
        writers: list[Any] = [vescale.ProgressLine(), vescale.JSONLines(self.folder / "metrics.jsonl")]
        writers += [] if config.tensorboard is None else [vescale.TensorBoard(config.tensorboard)]
        writers += [] if config.wandb is None else [vescale.WandB(**config.wandb)]
        begun = self.state["step"]
        return vescale.metrics(self.model, self.optimizer, writers=writers, every=config.every, start=begun)


def _counted(batch: dict[str, Tensor]) -> int:
    """Tokens that count in the loss of a causal model: all but the first of each row, and those that are left out."""
    return int((batch["labels"][:, 1:] >= 0).sum())


class Generators:
    """torch's generators, which later epochs and dropout are drawn from: one device's, alike on all ranks."""

    def state_dict(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator().type
            states[device] = torch.get_device_module(device).get_rng_state()
        return states

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Leaves those of a kind of device that is not here."""
        torch.set_rng_state(states["cpu"])
        for device in states.keys() & {getattr(torch.accelerator.current_accelerator(), "type", None)}:
            torch.get_device_module(device).set_rng_state(states[device])
