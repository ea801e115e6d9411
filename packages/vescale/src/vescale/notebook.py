"""Many ranks in a notebook's cell: `%load_ext vescale.notebook`, then `%%simulate 8` in a cell's first line.

%%simulate 4
model, optimizer = vescale.parallelize(plan, Net(), torch.optim.AdamW)
loss = model(batch).square().mean()
loss.item()
"""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import sys
import types
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from torch import Tensor, nn

from vescale_dtensor import MeshError

from .simulate import World

RANKS = "ranks"
"""The notebook's name for what a cell left on each rank."""


class Shell(Protocol):
    """The part of IPython's shell that is used here."""

    user_ns: dict[str, Any]
    compile: Any

    def transform_cell(self, cell: str) -> str: ...

    def register_magic_function(self, function: Callable, magic_kind: str, magic_name: str) -> None: ...


def load_ipython_extension(shell: Shell) -> None:
    """Called by `%load_ext vescale.notebook`: registers the cell magic `%%simulate`."""
    shell.register_magic_function(Cells(shell).simulate, magic_kind="cell", magic_name="simulate")


class Cells:
    """The simulated cells of one notebook: a world of ranks that lives from cell to cell, with each rank's names."""

    def __init__(self, shell: Shell) -> None:
        self._names = shell.user_ns
        self._shell = shell
        self._world: World | None = None
        self._spaces: list[dict[str, Any]] = []  # a rank's names
        self._shared: dict[str, Any] = {}  # what the notebook and the ranks both know under a name
        self._set: set[str] = set()  # by simulated cells

    def simulate(self, line: str, cell: str) -> Any:
        """%%simulate [RANKS]: the cell's code on every rank of a world of RANKS (8), in the notebook's own process.

        The world lives on with its models, until a cell asks for another number of ranks, or raises on some ranks what
        the others do not: the next cell says so, and begins anew. A cell reads what
        simulated cells before it have set, each rank its own, and the notebook's other names; of models, tensors and
        containers among these every rank gets a copy, when the name was set. Functions of the notebook's other cells
        keep seeing the notebook's names: give them what they are to work on. Afterwards `ranks[3]` holds what rank 3
        has set, and the notebook has the names of rank 0, to look at (`x.to_local()`, `x.draw()`): what communicates
        belongs in a simulated cell.

        What rank 0 prints is shown at once; lines that only others print, and values of the last line that read
        differently from rank 0's, are shown with their ranks when the cell is through.
        `vescale.breakpoint()` asks in the notebook.

        Raises as `vescale.simulate` does; MeshError for a line that is not a number of ranks.
        """
        text = line.strip() or "8"
        if not text.isdigit() or not int(text):
            raise MeshError("%%simulate", f"{text!r} is not a number of ranks", (), [("%%simulate 8", "")])
        code, last = _compiled(self._shell, cell)
        world = self._world_of(int(text))
        self._hand_over()
        before = [dict(names) for names in self._spaces]

        printed: list[_Printed] = []

        def run(rank: int) -> Any:
            printed.append(_Printed(sys.stdout if rank == 0 else None))
            with contextlib.redirect_stdout(printed[-1]):
                exec(code, self._spaces[rank])
                return None if last is None else eval(last, self._spaces[rank])

        try:
            values = world.call(run, is_last=False)
        finally:
            if not world.has_ended:
                self._take_back(before)
        _tell_others([one.getvalue() for one in printed])
        _tell_others([repr(value) for value in values])
        return values[0]

    def _world_of(self, ranks: int) -> World:
        world = self._world
        if world is None or world.has_ended or world.ranks != ranks:
            if world is not None and not world.has_ended:
                world.call(lambda rank: None, is_last=True)
            if world is not None and world.why:
                print(f"%%simulate: the ranks of earlier cells are gone, with what these set: {world.why}")
            for name in self._set:  # of a world that is gone
                if name in self._shared and self._names.get(name) is self._shared[name]:
                    del self._names[name]
            world = self._world = World(ranks)
            self._spaces, self._shared, self._set = [{} for _ in range(ranks)], {}, set()
        return world

    def _hand_over(self) -> None:
        """Hands names that the notebook has set since to all ranks."""
        for name in self._shared.keys() - self._names.keys():
            del self._shared[name]
            for names in self._spaces:
                names.pop(name, None)
        new = {
            name: value
            for name, value in self._names.items()
            if name not in _KEPT and not (name in self._shared and self._shared[name] is value)
        }
        self._shared.update(new)
        self._set -= new.keys()
        copied = {name: one for name, one in new.items() if isinstance(one, _DATA) and not name.startswith("_")}
        for names in self._spaces:
            names.update(new)
            names.update(copy.deepcopy(copied))  # at once: what is one object under two names is one

    def _take_back(self, before: list[dict[str, Any]]) -> None:
        """Takes a cell's names back to the notebook: those of rank 0, and `ranks`."""
        for names, earlier in zip(self._spaces, before):
            del names["__builtins__"]
            made = {name: one for name, one in names.items() if name not in earlier or earlier[name] is not one}
            self._set |= made.keys()
            if names is self._spaces[0]:
                self._names.update(made)
                self._shared.update(made)
                for name in earlier.keys() - names.keys():
                    self._names.pop(name, None)
                    self._shared.pop(name, None)
        self._names[RANKS] = [
            types.SimpleNamespace(**{name: names[name] for name in self._set if name in names})
            for names in self._spaces
        ]


_DATA = (nn.Module, Tensor, list, dict, set)
_KEPT = (RANKS, "In", "Out", "__builtins__")


def _compiled(shell: Shell, cell: str) -> tuple[types.CodeType, types.CodeType | None]:
    """The cell's statements, and the expression at its end, under a name by which debuggers find the source."""
    text = shell.transform_cell(cell)
    name = shell.compile.cache(text, raw_code=cell)
    tree = ast.parse(text, name)
    last, end = None, tree.body[-1] if tree.body else None
    if isinstance(end, ast.Expr) and not text.rstrip().endswith(";"):
        del tree.body[-1]
        last = compile(ast.Expression(end.value), name, "eval")
    return compile(tree, name, "exec"), last


class _Printed(io.StringIO):
    """Output of a rank, which may also be shown at once."""

    def __init__(self, screen: TextIO | None) -> None:
        super().__init__()
        self._screen = screen

    def write(self, text: str) -> int:
        if self._screen is not None:
            self._screen.write(text)
        return super().write(text)

    def flush(self) -> None:
        if self._screen is not None:
            self._screen.flush()


def _tell_others(texts: list[str]) -> None:
    """Prints what ranks have to say that rank 0 has not."""
    known = set(texts[0].splitlines())
    other: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        own = "\n".join(line for line in text.splitlines() if line not in known)
        if own:
            other.setdefault(own, []).append(rank)
    for text, ranks in other.items():
        print(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}")
