"""`vescale plan`: the plan of a model, and why, from its config alone; no GPU, no process group, no weights."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from vescale_dtensor import VescaleError
from vescale_plans import Plan, PlanError, Precision, generate_plan
from vescale_plans.search import MOST, Hardware, hardware_of
from vescale_rng import deferred_init, materialize

from .._planning.dry_run import dry_run
from .options import as_options

GIB = 2**30
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Dtypes as they may be asked for, by either name."""


def plan(
    model: Annotated[str, typer.Argument(help="Folder with a HuggingFace config.json, or module:factory.")],
    world_size: Annotated[int, typer.Option(help="Ranks.")],
    hardware: Annotated[str, typer.Option(help='Profile, such as h100; "auto" is this machine.')] = "auto",
    batch: Annotated[int | None, typer.Option(help="Rows of the global batch; one for each rank by default.")] = None,
    seq: Annotated[int, typer.Option(help="Positions of a row.")] = 4096,
    node: Annotated[int | None, typer.Option(help="Devices of a node; by default the profile's, 8 of an h100.")] = None,
    memory: Annotated[float | None, typer.Option(help="Usable GiB of one device.")] = None,
    objective: Annotated[str, typer.Option(help="time or memory.")] = "time",
    precision: Annotated[
        str | None, typer.Option(help="Computes in this dtype, such as bfloat16; by default the configuration's.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Dry-run the choice, and take the next best if it does not fit.")] = True,
    verify_stages: Annotated[
        bool, typer.Option(help="Also dry-run every stage of a pipeline; takes minutes for large models.")
    ] = False,
    pin: Annotated[list[str] | None, typer.Option(help="A setting to fix: tp=8, inside=mlp; may be repeated.")] = None,
    forbid: Annotated[list[str] | None, typer.Option(help="What must not be used, such as pp.")] = None,
    tokens: Annotated[float | None, typer.Option(help="Tokens to train on, such as 1e12: says days and hours.")] = None,
    price: Annotated[float | None, typer.Option(help="Of a device hour, in any currency, for --tokens.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the plan, for Plan.from_json.")] = None,
) -> None:
    """Makes a complete plan for a model, and shows the choice, the next best plans, what limits each, and the reason
    for every block.

    Memory is computed by formula, and then, for models of transformers, by a dry run of the choice; for a pipeline on
    request.
    """
    for option, path in (("--html", html), ("--json", json)):
        if path is not None and path.is_dir():
            remedies = [(f"{option} {path / 'plan'}{option.replace('--', '.')}", "a file in it")]
            raise PlanError("vescale plan", f"{option} {path} is a folder", (), remedies)
        if path is not None and not path.parent.is_dir():
            remedies = [(f"mkdir -p {path.parent}", "makes it")]
            raise PlanError("vescale plan", f"{option} {path}: there is no folder {path.parent}", (), remedies)
    for option, value in (("--tokens", tokens), ("--price", price)):
        if value is not None and not (isfinite(value) and value > 0):
            raise PlanError("vescale plan", f"{option} {value:g} is no positive number", (), [(f"{option} 2.5", "")])
    if price is not None and tokens is None:
        remedies = [("--tokens 1e12", "how long it is")]
        raise PlanError("vescale plan", "--price is of device hours of a run", (), remedies)
    if memory is not None and not isfinite(memory):
        raise PlanError("vescale plan", f"--memory {memory:g} is no number of GiB", (), [("--memory 80", "")])
    built, sample = _build(model)
    rows = world_size if batch is None else batch
    asked: dict[str, Any] = {} if memory is None else {"memory": int(memory * GIB)}
    if sample is not None:
        asked["sample"] = sample
    computed = _dtype_of(built) if precision is None else _dtype(precision)
    if precision is not None or computed is not torch.float32:
        asked["precision"] = Precision(computed)
    notes = []
    if precision is None and "precision" in asked:
        notes.append(f"computed in {str(computed).removeprefix('torch.')}, as the configuration says; kept in float32")
    most = getattr(getattr(built, "config", None), "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < seq:
        notes.append(f"rows of {seq} positions are longer than the configuration's max_position_embeddings, {most}")
    if verify and all(0 < n <= MOST for n in (rows, seq)) and (global_batch := _batch(built, rows, seq)) is not None:
        asked["verify"] = global_batch
    made = _generated(
        built,
        notes,
        runner=dry_run if verify_stages else None,
        world_size=world_size,
        batch=rows,
        seq=seq,
        hardware=hardware if node is None else _nodes(hardware, node),
        objective=objective,
        pin=_pins(pin or ()),
        forbid=tuple(forbid or ()),
        **asked,
    )
    console = Console()
    console.print(made.explain())
    if tokens is not None:
        console.print(_costs(made, tokens, price))
    for note in notes:
        console.print(note, highlight=False, markup=False)
    console.print(str(made), highlight=False, soft_wrap=True, markup=False)
    if html is not None:
        typer.echo(f"written to {made.explain().write_html(html)}")
    if json is not None:
        json.write_text(made.to_json())
        typer.echo(f"written to {json}")


def _generated(model: nn.Module, notes: list[str], **asked: Any) -> Plan:
    """`generate_plan`; without a dry run where the model does not run dry, which is noted."""
    try:
        return generate_plan(model, **asked)
    except VescaleError as error:
        raise as_options(error) from error
    except Exception as error:
        if asked.pop("verify", None) is None:
            raise
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        notes.append(f"memory is by formula alone: the model does not run dry ({why})")
        return _generated(model, notes, **asked)


def _costs(made: Plan, tokens: float, price: float | None) -> Table:
    """Returns what the choice and the next best take for so many tokens."""
    first, *_ = runs = made.explain().runs(tokens, price)
    title = f"{tokens:,.4g} tokens, {first.steps:,} steps, by formula"
    table = Table(title=title, title_justify="left")
    for name in ("", "days", "device hours", *(["cost"] if price is not None else []), "more"):
        table.add_column(name, justify="right")
    for place, one in enumerate(runs):
        cost = [] if one.cost is None else [f"{one.cost:,.0f}"]
        more = "" if one is first else f"{one.days / first.days - 1:+.1%}"
        table.add_row(str(place + 1), f"{one.days:,.4g}", f"{one.device_hours:,.0f}", *cost, more)
    return table


def _nodes(hardware: str, node: int) -> Hardware:
    """The profile, of machines with so many devices each."""
    if node < 1:
        raise PlanError("vescale plan", f"--node {node} is not a positive number", (), [("--node 8", "")])
    return replace(hardware_of(hardware), node=node, segment=0)


def _dtype(name: str) -> torch.dtype:
    for dtype, short in DTYPES.items():
        if name in (dtype, short):
            return getattr(torch, dtype)
    remedies = [(f"--precision {dtype}", f"or {short}") for dtype, short in DTYPES.items()]
    raise PlanError("vescale plan", f"--precision {name} is no dtype that models are trained in", (), remedies)


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Returns the dtype that a transformers configuration asks for; float32 for any other model."""
    asked = getattr(getattr(model, "config", None), "dtype", None)
    return (getattr(torch, asked, None) if isinstance(asked, str) else asked) or torch.float32


def _batch(model: nn.Module, rows: int, seq: int) -> Mapping[str, Any] | None:
    """A global batch that a transformers model makes a loss of; None for what takes no tokens and labels."""
    taken = inspect.signature(model.forward).parameters
    if not {"input_ids", "labels"} <= set(taken):
        return None
    tokens = torch.zeros((), dtype=torch.int64).expand(rows, seq)  # only its shape counts
    return {"input_ids": tokens, "labels": tokens}


def _pins(given: list[str]) -> Mapping[str, Any]:
    pins = {}
    for one in given:
        name, _, value = one.partition("=")
        if value.lower() in ("true", "false"):
            pins[name] = value.lower() == "true"
        elif value.isdigit():
            pins[name] = int(value)
        elif name == "inside" and value:
            pins[name] = tuple(value.split("+"))  # as a plan's line shows it
        else:
            raise PlanError("vescale plan", f"--pin {one!r} gives no number", (), [("--pin tp=8", "or --pin sp=true")])
    return pins


def _build(model: str) -> tuple[nn.Module, Any]:
    """The model without memory, and a sample where the factory gives one."""
    folder = Path(model)
    if folder.is_dir() or folder.name == "config.json":
        return model_of(folder.parent if folder.is_file() else folder), None
    module, colon, factory = model.partition(":")
    remedies = [("vescale plan ./folder", "with a config.json"), ("vescale plan package.module:factory", "")]
    if not colon:
        raise PlanError("vescale plan", f"{model!r} is neither a folder nor module:factory", (), remedies)
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise PlanError("vescale plan", f"{model!r} cannot be imported: {error}", (), remedies) from error
    finally:
        sys.path.remove(os.getcwd())
    with deferred_init():
        made = make()
    made, sample = made if isinstance(made, tuple) else (made, None)
    if not isinstance(made, nn.Module):
        remedies = [("return model", "an nn.Module"), ("return model, sample", "with what it is called with")]
        rule = f"{model!r} gives no model but an object of type {type(made).__name__}"
        raise PlanError("vescale plan", rule, (), remedies)
    return made, _with_values(sample)


def _with_values(sample: Any) -> Any:
    """The sample, whose tensors were made without memory, as the model's were."""
    match sample:
        case torch.Tensor():
            return materialize(sample)
        case Mapping():
            return {name: _with_values(one) for name, one in sample.items()}
        case tuple() | list():
            return type(sample)(map(_with_values, sample))
    return sample


def model_of(folder: Path) -> nn.Module:
    """Returns the model of a folder's config.json, without values."""
    try:
        import transformers
    except ImportError as error:
        remedies = [("pip install transformers", ""), ("vescale plan module:factory", "needs no transformers")]
        raise PlanError("vescale plan", f"{folder} is read by transformers, which is not here", (), remedies) from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        config.use_cache = False  # what is planned is training
        named = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            return named(config) if named is not None else transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of whatever type: transformers checks a config in many ways
        remedies = [("vescale plan module:factory", "builds the model by code of your own")]
        raise PlanError("vescale plan", f"{folder} holds no config that builds: {error}", (), remedies) from error
