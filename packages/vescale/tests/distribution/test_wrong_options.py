"""Every option and argument of every command, given what is none: the command says so, with exit status 2, and soon.

Also the variables of the environment that are ours.
"""

import contextlib
import io
import json
import signal
import sys
import traceback

import pytest
import typer

import vescale
from vescale import cli
from vescale_trace.environment import count, seconds

BOUND_S = 60
MODEL = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
MODEL |= {"num_hidden_layers": 1, "num_attention_heads": 4}
PATHS = ["", "/", "/dev/zero", "no/such/place", "bytes.bin"]
NUMBERS = ["-1", "2147483648", str(10**30), "nan"]
RIGHT = {
    "plan": ["model", "--world-size", "2", "--seq", "16", "--no-verify"],
    "schedule": [],
    "compare": ["none", "none"],
    "timeline": ["none"],
    "train": ["a.toml", "--dry-run", "1"],
    "inspect": ["none"],
    "verify": ["none"],
    "diff": ["none", "none"],
    "export": ["none", "out"],
    "serve-check": ["none"],
    "reshard": ["none", "out", "--ranks", "1"],
}
MEASURES = {("calibrate", "--ranks"), ("calibrate", "--rounds"), ("calibrate", "--out")}
"""What measures for minutes where it is given what may be."""
REFUSED = ["", "x", "-1", "0", "2147483648", str(10**30), "nan", "1.5"]


class TooLong(BaseException):
    pass


def too_long(*given):
    raise TooLong


def commands(group, before=()):
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, (*before, name))
        else:
            yield (*before, name), one


def lines():
    """Command lines with one wrong value each."""
    for path, command in commands(typer.main.get_command(cli.app)):
        places = [one for one in command.params if one.param_type_name == "argument"]
        for parameter in command.params:
            if parameter.name == "help" or getattr(parameter, "is_flag", False):
                continue
            base, wrong = RIGHT.get(path[-1], []), [*PATHS, *NUMBERS]
            if (path[-1], parameter.opts[0]) in MEASURES:
                wrong = ["/", "/dev"] if parameter.opts[0] == "--out" else REFUSED
            for value in dict.fromkeys(wrong):
                args = [*base, parameter.opts[0], value]
                if parameter in places:
                    at = places.index(parameter)
                    args = [*base[:at], value, *base[at + 1 :]]
                yield [*path, *args]


def outcome(args, monkeypatch):
    """Returns the exit status, and what was said; in place of the status, an error that was raw."""
    said = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["vescale", *args])
    signal.alarm(BOUND_S)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli.main()
    except SystemExit as error:
        return error.code or 0, said.getvalue()
    except TooLong:
        return f"takes more than {BOUND_S} s", said.getvalue()
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
        return f"{type(error).__name__}: {str(error)[:100]} at {where}", said.getvalue()
    finally:
        signal.alarm(0)
    return 0, said.getvalue()


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "a.toml").write_text('[model]\ntype = "llama"\n')
    (tmp_path / "bytes.bin").write_bytes(bytes(range(256)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    before = signal.signal(signal.SIGALRM, too_long)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.core
def test_wrong_values_of_all_options(here, monkeypatch):
    command = typer.main.get_command(cli.app)
    monkeypatch.setattr(typer.main, "get_command", lambda app: command)  # which is made anew for each line
    red, tried = [], 0
    for args in lines():
        status, said = outcome(args, monkeypatch)
        tried += 1
        if status not in (0, 1, 2) or "Traceback" in said:
            red.append(f"vescale {' '.join(map(repr, args))}: {status} {said[-200:]}")
    assert not red, "\n".join([f"{len(red)} of {tried}", *red])
    assert tried > 300


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["plan", "model", "--world-size", str(10**30)], "world_size"),
        (["plan", "model", "--world-size", "2", "--batch", "-1"], "batch"),
        (["plan", "", "--world-size", "2"], "config.json"),
        (["schedule", "--microbatches", "2147483648"], "forwards"),
        (["schedule", "--microbatches", "nan"], "microbatches"),
        (["schedule", "--forward", "nan"], "forward"),
        (["schedule", "--file", "/dev/zero"], "/dev/zero is longer than"),
        (["schedule", "--out", "no/such/place"], "no/such/place"),
        (["schedule", "--png", ""], "picture.png"),
        (["train", "/dev/zero"], "/dev/zero is longer than"),
        (["train", "bytes.bin"], "bytes.bin cannot be read"),
        (["train", ""], "cannot be read"),
        (["checkpoint", "inspect", "/dev/zero"], "/dev/zero"),
        (["checkpoint", "inspect", ""], "names no directory"),
        (["calibrate", "--rounds", str(10**30)], "10000"),
        (["compare", "/dev/zero", "none"], "/dev/zero"),
    ],
)
def test_what_is_wrong_is_named(here, monkeypatch, args, says):
    status, said = outcome(args, monkeypatch)
    assert status == 2 and says in said, said


@pytest.mark.parametrize("given", ["", "x", "nan", "inf", "-1", "0", "5m", "1e400"])
def test_a_number_of_seconds_in_the_environment(monkeypatch, given):
    monkeypatch.setenv("VESCALE_HANG_SECONDS", given)
    with pytest.raises(vescale.VescaleError, match=r"^VESCALE_HANG_SECONDS: "):
        seconds("VESCALE_HANG_SECONDS", None)


@pytest.mark.parametrize("given", ["", "x", "nan", "-1", "1.5", str(10**30), "2147483648"])
def test_a_number_of_ranks_in_the_environment(monkeypatch, given):
    monkeypatch.setenv("WORLD_SIZE", given)
    with pytest.raises(vescale.VescaleError, match=r"^WORLD_SIZE: "):
        count("WORLD_SIZE", 1)
