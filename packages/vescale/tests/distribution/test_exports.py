"""The public names of each package are these, and versions agree wherever they are written."""

import importlib
import inspect
import pickle
import types
from pathlib import Path

import pytest

import vescale
from package_tree import read_packages

TOP = Path(__file__).absolute().parents[4]
PACKAGES = {package.module: package for package in read_packages(TOP)}

# What a package exports is a promise: a name comes or goes by an edit here, in the same change.
PUBLIC = {
    "vescale": {
        "Boundary",
        "CheckpointError",
        "CommunicationError",
        "CompileWarning",
        "ConflictError",
        "CorruptError",
        "DTensor",
        "DryRun",
        "FallbackWarning",
        "FormatError",
        "GlobalValueWarning",
        "GradientError",
        "ImplicitCommunicationError",
        "InfeasibleError",
        "InterleavedShard",
        "InternalError",
        "JSONLines",
        "MeshError",
        "MismatchError",
        "OperatorError",
        "Partial",
        "PeerError",
        "Pipeline",
        "PipelineError",
        "PipelineFailure",
        "PlacementError",
        "PlainTensorError",
        "Plan",
        "PlanError",
        "Policy",
        "Precision",
        "ProgressLine",
        "RaggedShard",
        "RandomStateError",
        "RandomStreamError",
        "Replicate",
        "ReproducibleError",
        "Retention",
        "ScheduleError",
        "ShapeError",
        "Shard",
        "SharedMemoryWarning",
        "StorageError",
        "TensorBoard",
        "UnsafeError",
        "Values",
        "VescaleError",
        "ViewError",
        "WandB",
        "adopt",
        "balanced_cuts",
        "breakpoint",
        "check_premise",
        "check_rng_in_step",
        "comm_trace",
        "compare",
        "deferred_init",
        "distribute_tensor",
        "dry_run",
        "expert_drops",
        "expert_load",
        "explain",
        "explain_calls",
        "explain_compile",
        "graphed",
        "GraphWarning",
        "explaining",
        "export_huggingface",
        "fork_rng",
        "from_pretrained",
        "generate_plan",
        "get_rng_state",
        "is_deferred",
        "latest",
        "load",
        "loader",
        "local_map",
        "manual_seed",
        "materialize",
        "merge_timeline",
        "metrics",
        "no_sync",
        "parallelize",
        "plan_from_config",
        "predict",
        "protect",
        "rand",
        "randint",
        "randn",
        "randperm",
        "record",
        "register_elementwise",
        "register_rule",
        "reproducible",
        "reshape",
        "reshard",
        "save",
        "set_rng_state",
        "simulate",
        "strict",
        "timeline",
        "use_rng_stream",
        "whole_state_dict",
        "zigzag",
    },
    "vescale_checkpoint": {
        "CheckpointError",
        "ConflictError",
        "CorruptError",
        "FormatError",
        "MismatchError",
        "PeerError",
        "PendingSave",
        "Protected",
        "Report",
        "Retention",
        "StorageError",
        "UnsafeError",
        "close",
        "export_huggingface",
        "latest",
        "load",
        "protect",
        "reshard",
        "save",
        "whole_state_dict",
    },
    "vescale_dtensor": {
        "CommunicationError",
        "DTensor",
        "Event",
        "FallbackWarning",
        "GlobalValueWarning",
        "GradientError",
        "ImplicitCommunicationError",
        "InterleavedShard",
        "InternalError",
        "Layout",
        "MeshError",
        "OperatorError",
        "Partial",
        "Placement",
        "PlacementError",
        "PlainTensorError",
        "RaggedShard",
        "Replicate",
        "ReproducibleError",
        "ShapeError",
        "Shard",
        "Trace",
        "VescaleError",
        "ViewError",
        "arange",
        "breakpoint",
        "check_premise",
        "comm_trace",
        "distribute_tensor",
        "empty",
        "explain",
        "explaining",
        "from_local",
        "from_torch",
        "full",
        "local_map",
        "ones",
        "rand",
        "randn",
        "redistribute",
        "register_function",
        "register_rule",
        "reproducible",
        "strict",
        "to_torch",
        "zeros",
        "zigzag",
    },
    "vescale_pipeline": {
        "Action",
        "Costs",
        "Event",
        "PipelineError",
        "PipelineFailure",
        "Schedule",
        "ScheduleError",
        "Simulation",
        "Verdict",
        "add_communication",
        "balanced_cuts",
        "chrome_trace",
        "draw",
        "generate",
        "peak_memory",
        "record_events",
        "simulate",
        "verify",
    },
    "vescale_plans": {
        "Boundary",
        "Calls",
        "CompileWarning",
        "DryRun",
        "InfeasibleError",
        "Loader",
        "Pipeline",
        "Plan",
        "PlanError",
        "Policy",
        "Precision",
        "SharedMemoryWarning",
        "adopt",
        "dry_run",
        "expert_drops",
        "expert_load",
        "explain_calls",
        "explain_compile",
        "graphed",
        "GraphWarning",
        "generate_plan",
        "loader",
        "no_sync",
        "parallelize",
        "register_elementwise",
        "reshape",
    },
    "vescale_rng": {
        "Geometry",
        "RandomStateError",
        "RandomStreamError",
        "attributes_of",
        "check_in_step",
        "current_stream",
        "deferred_init",
        "distribute",
        "fork",
        "get_state",
        "is_deferred",
        "is_unwritten",
        "manual_seed",
        "materialize",
        "materialize_shard",
        "rand",
        "randint",
        "randn",
        "randperm",
        "recorded",
        "set_state",
        "use_geometry",
        "use_stream",
    },
    "vescale_trace": {"VescaleError"},
}

OF_TESTS = {
    "Allocations",
    "LiveBytes",
    "RankError",
    "RankTimeout",
    "World",
    "WorldStartError",
    "allocations",
    "assert_ranks_agree",
    "dumps",
    "failing",
    "fake_world",
    "fitting",
    "free_port",
    "full_values",
    "in_turns",
    "intercepted",
    "killed_at",
    "loads",
    "mesh_of",
    "python_state_programs",
    "raises_on_all",
    "run_ranks",
    "short_writes",
    "shutdown",
    "slice_of",
    "unnamed",
    "warm_up",
}
"""The names of the test kit."""


def public_names(module):
    """Its names without an underscore; submodules that were imported on the way are not names of its own."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not (isinstance(value, types.ModuleType) and value.__name__ == f"{module.__name__}.{name}")
    }


@pytest.mark.parametrize("module", sorted(PACKAGES))
def test_public_names(module):
    assert public_names(importlib.import_module(module)) == {**PUBLIC, "vescale_testkit": OF_TESTS}[module]


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_every_error_and_warning_has_its_name_in_vescale(module):
    """So that whoever installs the one package can catch, or filter, whatever any of them raises."""
    facade = importlib.import_module("vescale")
    for name, value in vars(importlib.import_module(module)).items():
        if isinstance(value, type) and issubclass(value, BaseException) and not name.startswith("_"):
            assert getattr(facade, name) is value


@pytest.mark.parametrize("module", sorted(PACKAGES))
def test_version(module):
    package = PACKAGES[module]
    assert importlib.import_module(module).__version__ == package.version
    changelog = (package.folder / "CHANGELOG.md").read_text()
    newest = next(line for line in changelog.splitlines() if line.startswith("## "))
    assert newest == f"## {package.version}"


def test_pickle_finds_every_public_function():
    """A program that starts processes sends its functions by name."""
    for name in dir(vescale):
        one = getattr(vescale, name)
        if inspect.isfunction(one) and name[0] != "_":
            assert pickle.loads(pickle.dumps(one)) is one, name
