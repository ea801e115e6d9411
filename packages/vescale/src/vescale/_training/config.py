"""The configuration of `vescale train`: what may be said, and errors that name the key, the line and what was meant."""

from __future__ import annotations

import difflib
import importlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vescale_dtensor import VescaleError

from .._machine.text_file import text_of

Count = Annotated[int, Field(ge=1)]
_SHOWN = 8


class ConfigError(VescaleError):
    """A configuration of `vescale train` is wrong; the text names each key, its line and a remedy."""


def library(name: str) -> Any:
    """Returns an optional library. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        rule = f"this configuration needs {name}, which is not here: {error}"
        raise ConfigError("vescale train", rule, (), [("pip install 'vescale[train]'", "")]) from error


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Model(Section):
    """The model that is trained: `name`, or `type`; of both, the weights are the name's."""

    name: str | None = Field(None, description="HuggingFace name or folder, or module:function of your own.")
    type: str | None = Field(
        None, description="A HuggingFace model type, such as llama, of which config says the rest."
    )
    config: dict[str, Any] = Field({}, description="Replaces entries of its configuration; arguments of the function.")
    weights: bool = Field(True, description="Whether a HuggingFace name's weights are loaded; else they are random.")
    lora: dict[str, Any] = Field({}, description="Arguments of peft.LoraConfig; only the adapter is trained then.")

    @property
    def is_function(self) -> bool:
        """True for a function of the user's own."""
        return self.name is not None and ":" in self.name

    @property
    def published(self) -> str | None:
        """HuggingFace name or folder, if there is one."""
        return None if self.is_function else self.name


class Data(Section):
    """The data that it is trained on: one of `text`, `rows` and `tokens`."""

    text: str | None = Field(None, description="Text files, as a glob; each is a document.")
    rows: str | None = Field(None, description="Files of JSON lines, as a glob, or a hub's name (needs datasets).")
    tokens: str | None = Field(None, description="A .npy file of integers, one after another.")
    tokenizer: str | None = Field(None, description="HuggingFace name or folder; bytes; by default the model's.")
    objective: Literal["pretraining", "sft"] = Field(
        "pretraining", description="pretraining: the column `text`. sft: `messages`, or `prompt` and `completion`."
    )
    length: Count = Field(1024, description="Positions of a row.")
    documents: bool = Field(False, description="Whether positions begin anew with each document of a row.")
    held_out: float = Field(0.0, ge=0, lt=1, description="Share of the rows, the last ones, kept for evaluation.")
    cache: str = Field("~/.cache/vescale/tokens", description="Folder of what was tokenised.")


class Training(Section):
    """How long, and with how much at once."""

    steps: Count = Field(description="Optimizer steps in all.")
    batch: Count = Field(8, description="Rows of a step, on all ranks together.")
    accumulate: Count = Field(1, description="Parts that a step computes one after another.")
    seed: int = Field(0, ge=0, description="Of weights, order of rows and dropout.")


class Optimizer(Section):
    """The optimizer and its learning rate by step."""

    name: str = Field("AdamW", description="A class of torch.optim.")
    lr: float = Field(3e-4, gt=0, description="The highest learning rate.")
    options: dict[str, Any] = Field({}, description="Its further arguments, such as weight_decay = 0.1.")
    clip: float | None = Field(1.0, gt=0, description="Norm that gradients are clipped to.")
    warmup: int = Field(0, ge=0, description="Steps in which the rate rises.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Of the rate after that.")
    floor: float = Field(0.1, ge=0, le=1, description="The last rate, as a share of the highest.")


class Planning(Section):
    """How it is spread over the ranks."""

    file: str | None = Field(None, description="A plan as JSON, {ranks} in it is their number; else it is generated.")
    pin: dict[str, Any] = Field({}, description="Settings that a generated plan has, such as tp = 2.")
    hardware: str = Field("auto", description="Profile that a generated plan is for.")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="Dtype of a generated plan's products.")
    mode: Literal["eager", "compile"] = Field("eager", description="See parallelize.")
    reproducible: bool = Field(
        False, description="One device's results to the bit: without a pipeline, and microbatches, unless pinned."
    )

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that a generated plan has."""
        return {"pp": 1, "microbatches": 1, **self.pin} if self.reproducible else self.pin


class Checkpoint(Section):
    """Where the run is kept. It goes on from the newest step that is there."""

    folder: str = Field("outputs/run", description="Of the steps, and of metrics.jsonl.")
    every: Count = Field(100, description="Steps between two saves.")
    protect: int = Field(0, ge=0, description="Steps between two that are kept in the nodes' memory; 0: none is.")
    keep: Count = Field(2, description="Newest steps that are kept.")
    export: str | None = Field(None, description="Folder for the HuggingFace model at the end; must not exist.")


class Evaluation(Section):
    """Looks at the model in between."""

    every: int = Field(0, ge=0, description="Steps between two evaluations; 0: none.")
    batches: Count = Field(8, description="Batches of rows held out.")
    prompt: str | None = Field(None, description="Text that the model goes on with after each evaluation.")
    tokens: Count = Field(64, description="How far.")


class Log(Section):
    """Who is told of the steps."""

    every: Count = Field(10, description="Steps that are told as one.")
    tensorboard: str | None = Field(None, description="Folder for TensorBoard.")
    wandb: dict[str, Any] | None = Field(None, description="Arguments of wandb.init.")


class Config(Section):
    """A whole run."""

    model: Model
    data: Data
    training: Training
    optimizer: Optimizer = Optimizer()
    plan: Planning = Planning()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    log: Log = Log()


def read_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration in a TOML file. `overrides`: such as "training.steps=50", which replace its entries.

    Raises ConfigError for a file that cannot be read, unknown keys, values of a wrong type or range, and for what
    does not go together.
    """
    text = text_of(path, ConfigError, "vescale train", _EXAMPLE)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("vescale train", f"{path} is no TOML: {error}", (), [_QUOTES]) from error
    given = dict(map(_override, overrides))
    for keys, value in given.items():
        inner = table
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                rule = f"{'.'.join(keys)} is set on the command line, and {key} is no table"
                raise ConfigError("vescale train", rule, (), ())
        inner[keys[-1]] = value
    where = lambda keys: "the command line" if keys in given else f"{path}, {_line(text, keys)}"
    try:
        config = Config.model_validate(table)
    except ValidationError as error:
        found = [_told(one, table, where) for one in error.errors()]
        rule = f"{path} has {len(found)} mistakes" if len(found) > 1 else f"{path} has a mistake"
        remedies = list(dict.fromkeys(mend for _, mend in found if mend is not None))
        raise ConfigError("vescale train", rule, [what for what, _ in found[:_SHOWN]], remedies[:_SHOWN]) from None
    for keys, rule, mend in _contradictions(config):
        raise ConfigError("vescale train", rule, [where(keys)], [mend])
    return config


def _override(text: str) -> tuple[tuple[str, ...], Any]:
    """A value is TOML, or a text as it stands."""
    name, sign, value = text.partition("=")
    keys = tuple(name.split("."))
    if not sign or not all(keys):
        remedies = [("vescale train config.toml training.steps=50", "")]
        raise ConfigError("vescale train", f"{text!r} sets nothing: it is not section.key=value", (), remedies)
    try:
        return keys, tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return keys, value


def _line(text: str, keys: Sequence[str]) -> str:
    """Says in which line of the file an entry stands: its own, or that of the table that should have it."""
    table: list[str] = []
    best, line = 0, 1
    for number, row in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[\s*([\w.\"-]+)\s*\]", row):
            found = table = head[1].replace('"', "").split(".")
        elif entry := re.match(r"\s*([\w.\"-]+)\s*=", row):
            found = [*table, *entry[1].replace('"', "").split(".")]
        else:
            continue
        common = next((i for i, (a, b) in enumerate(zip(found, keys)) if a != b), min(len(found), len(keys)))
        if common > best and common == len(found):
            best, line = common, number
    return f"line {line}"


def _told(error: Any, table: Mapping[str, Any], where: Any) -> tuple[str, tuple[str, str] | None]:
    """A mistake in a line, and how it is mended."""
    keys = tuple(map(str, error["loc"]))
    name, at = ".".join(keys), where(keys)
    section = _section(keys[:-1])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(keys[-1], section.model_fields, 1, 0.5)
        elsewhere = [".".join(path) for path in _entries() if path[-1] == keys[-1]]
        meant = [".".join([*keys[:-1], *near])] if near else elsewhere or [".".join([*keys[:-1], "..."])]
        has = ", ".join(section.model_fields)
        return f"{at}: there is no {name}", (meant[0], f"[{'.'.join(keys[:-1])}] has {has}" if keys[1:] else has)
    if error["type"] == "missing":
        about = section.model_fields[keys[-1]].description or "a table"
        return f"{at}: {name} is missing", (f"{keys[-1]} = ..." if keys[1:] else f"[{name}]", about)
    field = section.model_fields.get(keys[-1])
    about = getattr(field, "description", None) or ""
    return f"{at}: {name} = {error['input']!r}: {error['msg'].lower()}", (f"{name} = {_example(field)}", about)


def _section(keys: Sequence[str]) -> type[Section]:
    section: type[Section] = Config
    for key in keys:
        field = section.model_fields.get(key)
        kind = getattr(field, "annotation", None)
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            break
        section = kind
    return section


def _entries() -> Iterator[tuple[str, str]]:
    for name, field in Config.model_fields.items():
        yield from ((name, key) for key in field.annotation.model_fields)  # type: ignore[union-attr]


def _example(field: Any) -> str:
    """A value that an entry may have."""
    if field is None:
        return "..."
    if choices := [one for one in get_args(field.annotation) if isinstance(one, str)]:
        return f'"{choices[0]}"'
    kinds = (field.annotation, *get_args(field.annotation))
    made = {bool: "true", int: "1", float: "0.1", str: '"..."'}
    return next((text for kind, text in made.items() if kind in kinds), "{}")


def _contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str, tuple[str, str]]]:
    """Yields contradictions between entries: the entry, the rule, and how it is mended."""
    model, data, training, plan = config.model, config.data, config.training, config.plan
    if model.name is None and model.type is None:
        yield ("model",), "[model] has neither name nor type", ('type = "llama"', "or a name")
    if model.type is not None and model.is_function:
        yield ("model", "type"), "model.type is for HuggingFace's, and model.name is a function", ("without type", "")
    named = [key for key in ("text", "rows", "tokens") if getattr(data, key) is not None]
    if len(named) != 1:
        rule = f"[data] has {' and '.join(named) or 'none'} of text, rows, tokens, and needs exactly one"
        yield ("data", *named[1:2]), rule, ('text = "folder/*.txt"', "and not the others")
    if training.batch % training.accumulate:
        rule = f"training.batch = {training.batch} rows have no {training.accumulate} equal parts"
        yield (
            ("training", "accumulate"),
            rule,
            (f"batch = {training.accumulate * -(-training.batch // training.accumulate)}", ""),
        )
    if config.optimizer.warmup >= training.steps:
        rule = f"optimizer.warmup = {config.optimizer.warmup} is not below training.steps = {training.steps}"
        yield ("optimizer", "warmup"), rule, (f"warmup = {training.steps // 10}", "")
    if plan.file is not None and (plan.pin or plan.precision != "float32"):
        rule = "plan.pin and plan.precision are for a plan that is generated, and plan.file names one that is made"
        yield ("plan", "file"), rule, ("without file", "or without pin and precision")
    if data.objective == "sft" and data.rows is None:
        rule = 'data.objective = "sft" needs rows with messages, or with prompt and completion'
        yield ("data", "objective"), rule, ('rows = "data/*.jsonl"', "")
    if data.objective == "sft" and data.tokenizer == "bytes":
        rule = 'data.objective = "sft" needs a tokenizer with a chat template, and bytes have none'
        yield ("data", "tokenizer"), rule, ('tokenizer = "..."', "a HuggingFace name or folder")
    if data.tokenizer is None and data.tokens is None and model.published is None:
        rule = "data.tokenizer is missing: the model has no name that one belongs to"
        yield ("data", "tokenizer"), rule, ('tokenizer = "bytes"', "or a HuggingFace name or folder")
    if config.evaluation.every and not data.held_out:
        yield ("data", "held_out"), "evaluation.every needs rows that are not trained on", ("held_out = 0.05", "")
    if config.evaluation.prompt is not None and data.tokens is not None and data.tokenizer is None:
        yield ("evaluation", "prompt"), "evaluation.prompt needs a tokenizer", ('tokenizer = "..."', "in [data]")


_QUOTES = ('name = "text in quotes"', "and [section] above its entries")
_EXAMPLE = [("vescale train recipes/shakespeare.toml", "is one that trains")]
