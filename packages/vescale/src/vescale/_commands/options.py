"""Turns a planner's advice into options of the command: `batch=64, pin={'tp': 2}` is `--batch 64 --pin tp=2`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from vescale_dtensor import VescaleError

GIB = 2**30


def as_options(error: VescaleError) -> VescaleError:
    """The same error, whose remedies are options wherever they are keyword arguments of `generate_plan`."""
    remedies = [(_options(code), cost) for code, cost in error.remedies]
    return type(error)(error.operation, error.rule, error.operands, remedies)


def _options(code: str) -> str:
    """The options that say what the keyword arguments in `code` say; `code` itself where it is anything else."""
    try:
        call = ast.parse(f"generate_plan({code})", mode="eval").body
    except SyntaxError:
        return code
    if not isinstance(call, ast.Call) or call.args or not all(one.arg in WRITTEN for one in call.keywords):
        return code
    try:
        return " ".join(WRITTEN[str(one.arg)](_value(one.value)) for one in call.keywords)
    except ValueError:
        return code


def _value(node: ast.expr) -> Any:
    """Value of a literal, and of sizes as they are written: `round(46.4 * 2**30)`."""
    match node:
        case ast.Call(func=ast.Name(id="round"), args=[size]):
            return round(_value(size))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _value(left) ** _value(right)
    return ast.literal_eval(node)


def _named(option: str, unknown: str) -> Callable[[Any], str]:
    return lambda value: f"{option} {unknown if value is ... else value}"


def _memory(value: Any) -> str:
    """Formats at least so many bytes, in four digits."""
    return "--memory GIB" if value is ... else f"--memory {value / GIB * 1.0005:.4g}"


def _pins(value: Any) -> str:
    return " ".join(f"--pin {name}={_pin(one)}" for name, one in value.items()) if value else "without --pin"


def _pin(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(value) if isinstance(value, tuple | list) else str(value)


def _forbids(value: Any) -> str:
    if not all(isinstance(one, str) for one in value):
        raise ValueError("a combination is no option")
    return " ".join(f"--forbid {one}" for one in value) if value else "without --forbid"


WRITTEN: Mapping[str, Callable[[Any], str]] = {
    "world_size": _named("--world-size", "RANKS"),
    "batch": _named("--batch", "ROWS"),
    "seq": _named("--seq", "POSITIONS"),
    "hardware": _named("--hardware", "PROFILE"),
    "objective": _named("--objective", "time"),
    "memory": _memory,
    "pin": _pins,
    "forbid": _forbids,
    "sample": lambda value: "vescale plan module:factory",
}
"""Each argument as it is given to the command."""
