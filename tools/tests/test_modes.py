"""The modes of torch's that veScale's packages define: each has its row here, and there are no others."""

import ast
from pathlib import Path

from package_tree import read_packages

TOP = Path(__file__).absolute().parents[2]
KINDS = {"TorchFunctionMode": "functions", "TorchDispatchMode": "operators"}
# file, class, what it sees | while | for what
MODES = """
_reproducible/mode.py reproducible functions | a user's block | answers: canonical forms in place of sums
_context/described.py _Watch functions | a mask is described | refuses what mixes positions; tables to look up
_debugger/origins.py _Recorder functions | `explaining` | listens: what made each DTensor
_dry/meter.py Meter operators | a dry run, and the planner's probes | listens: bytes alive, FLOPs
search/probing/run.py Probe operators | the planner's probes | answers: stubs every contraction
search/probing/model.py OnOneDevice functions | the planner's probes | answers what C++ would refuse on two devices
search/probing/step.py _Fused functions | the planner's probes | answers: attention as kernels hold it
_trace/seen.py Seen operators | a pipeline's dry run | listens: writes to memory, draws
_trace/rows/notes.py Notes functions | a pipeline's dry run | listens: how the loss comes from the rows
_trace/record.py _Weights functions | a pipeline's dry run | answers: placeholders for parameters
balance.py _Counter operators | `balanced_cuts` | listens: FLOPs and bytes by module
pretrained.py _Views functions | transformers names a state's parts | answers: parts of a tensor stay views of it
_deferred/deferred.py _Recording operators | `deferred_init` | answers: factories record and make nothing
memory/live_bytes.py LiveBytes operators | tests | listens: storages alive
trait_check.py Watch functions | tests | listens, and tries each function's traits
"""


def defined():
    """Yields (file, class, what it sees) of every class that is a mode by its bases' names."""
    for package in read_packages(TOP):
        for path in package.source.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                for base in node.bases if isinstance(node, ast.ClassDef) else ():
                    if (name := ast.unparse(base).rpartition(".")[2]) in KINDS:
                        yield path.relative_to(package.source).as_posix(), node.name, KINDS[name]


def test_every_mode_has_its_row():
    rows = [tuple(row.partition(" | ")[0].split()) for row in MODES.strip().splitlines()]
    assert sorted(rows) == sorted(defined())
