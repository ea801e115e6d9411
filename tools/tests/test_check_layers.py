"""Each rule of check_layers is broken in a small tree, and the check says so; this repository breaks none."""

from pathlib import Path

import pytest

from checks.check_layers import CHECKS, MANY_LINES, MOST_LINES, Repository, long_modules

TOP = Path(__file__).absolute().parents[2]

PYPROJECT = """\
[project]
name = "{distribution}"
dependencies = [{requirements}]
"""
LIBRARY = """\
load("//tools/build_defs:python.bzl", "pytest_suites", "python_library")
python_library(name = "{module}", srcs = glob(["src/**"]), deps = {deps})
pytest_suites(name = "core", deps = [":{module}"], suites = ["values"])
"""
DESIGN = """\
| folder | distribution / module | holds | may import |
|---|---|---|---|
| packages/dtensor | vescale-dtensor / `vescale_dtensor` | tensors | torch |
| packages/plans | vescale-plans / `vescale_plans` | plans | torch, dtensor |
| packages/testkit | vescale-testkit / `vescale_testkit` | tests | torch, dtensor |
| packages/vescale | vescale / `vescale` | the facade | all |
"""
IMPORTS = {"dtensor": [], "plans": ["dtensor"], "testkit": ["dtensor"], "vescale": ["dtensor", "plans"]}


@pytest.fixture
def tree(tmp_path):
    """A small tree that breaks no rule."""
    for package, siblings in IMPORTS.items():
        module = "vescale" if package == "vescale" else f"vescale_{package}"
        stated = "==0.1.0" if package == "testkit" else ">=0.1,<0.3"
        requirements = ["torch>=2.11"] + [f"vescale-{sibling}{stated}" for sibling in siblings]
        files = {
            "pyproject.toml": PYPROJECT.format(
                distribution=module.replace("_", "-"),
                requirements=", ".join(f'"{requirement}"' for requirement in requirements),
            ),
            "BUILD": LIBRARY.format(
                module=module, deps=[f"//packages/{sibling}:vescale_{sibling}" for sibling in siblings]
            ),
            "README.md": "",
            "CHANGELOG.md": "",
            f"src/{module}/py.typed": "",
            f"src/{module}/_version.py": '__version__ = "0.1.0"\n',
            f"src/{module}/__init__.py": "".join(f"import vescale_{sibling}\n" for sibling in siblings),
        }
        for file, text in files.items():
            write(tmp_path / "packages" / package / file, text)
    write(tmp_path / "packages/dtensor/tests/values/test_layout.py", "")
    write(tmp_path / "packages/dtensor/tests/test_other.py", "")
    write(tmp_path / "docs/design.md", DESIGN)
    write(tmp_path / "README.md", "".join(f"[it](packages/{package}/README.md)\n" for package in IMPORTS))
    write(tmp_path / "tools/build_defs/python.bzl", (TOP / "tools/build_defs/python.bzl").read_text())
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def findings(top):
    repository = Repository(top)
    return [finding for check in CHECKS for finding in check(repository)]


def test_this_repository_breaks_no_rule():
    assert findings(TOP) == []


def test_the_small_tree_breaks_no_rule(tree):
    assert findings(tree) == []


def test_an_import_against_the_layers(tree):
    write(tree / "packages/dtensor/src/vescale_dtensor/_a.py", "def late():\n    import vescale_plans.plan\n")
    assert findings(tree) == [
        "packages/dtensor: imports plans, which its row in docs/design.md does not allow",
        "packages/dtensor/pyproject.toml: names none; its sources import plans",
        "packages/dtensor/BUILD: names none; its sources import plans",
    ]


def test_a_sibling_that_is_required_and_not_imported(tree):
    write(tree / "packages/plans/src/vescale_plans/__init__.py", "")
    assert findings(tree) == [
        "packages/plans/pyproject.toml: names dtensor; its sources import none",
        "packages/plans/BUILD: names dtensor; its sources import none",
    ]


def test_a_sibling_that_bazel_does_not_know_of(tree):
    edit(tree / "packages/plans/BUILD", "deps = ['//packages/dtensor:vescale_dtensor']", "deps = []")
    assert findings(tree) == ["packages/plans/BUILD: names none; its sources import dtensor"]


def test_a_meta_package_that_leaves_one_out(tree):
    edit(tree / "packages/vescale/pyproject.toml", ', "vescale-plans>=0.1,<0.3"', "")
    assert findings(tree) == ["packages/vescale/pyproject.toml: names dtensor; the meta package brings dtensor, plans"]


def test_parentheses_in_the_table_allow_and_do_not_demand(tree):
    edit(tree / "docs/design.md", "| torch, dtensor |", "| torch, (dtensor) |")
    assert findings(tree) == []


def test_a_package_without_a_row(tree):
    edit(tree / "docs/design.md", "packages/plans ", "packages/plan ")
    assert "the table of docs/design.md lacks plans" in findings(tree)
    assert "packages/ lacks plan" in findings(tree)


def test_a_third_party_import_that_is_not_declared(tree):
    write(tree / "packages/dtensor/src/vescale_dtensor/_a.py", "import json\nimport numpy.linalg\n")
    assert findings(tree) == ["packages/dtensor/src/vescale_dtensor/_a.py:2: imports numpy, which is not declared"]


def test_a_sibling_that_is_pinned(tree):
    edit(tree / "packages/plans/pyproject.toml", "vescale-dtensor>=0.1,<0.3", "vescale-dtensor==0.1.0")
    assert findings(tree) == [
        "packages/plans/pyproject.toml: pins vescale-dtensor; a range lets it be released apart"
    ]


def test_a_range_that_the_tree_has_left(tree):
    edit(tree / "packages/dtensor/src/vescale_dtensor/_version.py", "0.1.0", "0.3.0")
    assert findings(tree) == [
        f"packages/{package}/pyproject.toml: requires vescale-dtensor{stated}, and the tree has 0.3.0"
        for package, stated in (("plans", ">=0.1,<0.3"), ("testkit", "==0.1.0"), ("vescale", ">=0.1,<0.3"))
    ]


def test_a_range_without_the_next_minor_version(tree):
    edit(tree / "packages/dtensor/src/vescale_dtensor/_version.py", "0.1.0", "0.2.4")
    edit(tree / "packages/testkit/pyproject.toml", "==0.1.0", "==0.2.4")
    assert findings(tree) == [
        f"packages/{package}/pyproject.toml: requires vescale-dtensor>=0.1,<0.3, which leaves out the next minor "
        "version, 0.3.0"
        for package in ("plans", "vescale")
    ]


@pytest.mark.parametrize("source", ["from vescale_dtensor._a import b", "import vescale_dtensor._a.b"])
def test_a_private_module_of_a_sibling(tree, source):
    write(tree / "packages/plans/src/vescale_plans/own.py", f"from ._mine import it\n{source}\n")
    (finding,) = findings(tree)
    assert finding.startswith("packages/plans/src/vescale_plans/own.py:2: imports vescale_dtensor._a.b, which is")


def test_a_private_name_of_a_sibling(tree):
    write(tree / "packages/plans/src/vescale_plans/own.py", "from vescale_dtensor import __version__, _b\n")
    assert findings(tree) == [
        "packages/plans/src/vescale_plans/own.py:1: imports vescale_dtensor._b, which is private there"
    ]


def test_another_range_of_torch(tree):
    edit(tree / "packages/dtensor/pyproject.toml", "torch>=2.11", "torch>=2.13")
    assert findings(tree) == ["packages/dtensor/pyproject.toml: does not require torch>=2.11"]


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "from torch.distributed.device_mesh import init_device_mesh",
        "import torch\ntorch.distributed.barrier()",
    ],
)
def test_communication_in_a_module_that_is_not_named_for_it(tree, source):
    write(tree / "packages/dtensor/src/vescale_dtensor/_layouts/layout.py", source)
    (finding,) = findings(tree)
    assert "layout.py:" in finding and "is not one of the modules that communicate" in finding


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("collectives", "import torch.distributed as dist"),
        ("layout", "from torch.distributed.device_mesh import DeviceMesh"),
        ("layout", "from torch.distributed.tensor.placement_types import Placement"),
    ],
)
def test_modules_that_communicate_and_values_that_do_not(tree, module, source):
    write(tree / f"packages/dtensor/src/vescale_dtensor/{module}.py", source)
    assert findings(tree) == []


def test_a_module_that_is_too_long(tree):
    module = tree / "packages/dtensor/src/vescale_dtensor/_tensor/tensor.py"
    write(module, "x = 1\n" * (MANY_LINES + 1))
    assert findings(tree) == []
    assert len(list(long_modules(Repository(tree)))) == 1
    write(module, "x = 1\n" * (MOST_LINES + 1))
    assert findings(tree) == [
        "packages/dtensor/src/vescale_dtensor/_tensor/tensor.py: 701 lines, more than 700; split it by noun"
    ]


def test_a_module_without_a_noun(tree):
    write(tree / "packages/plans/src/vescale_plans/utils.py", "")
    assert findings(tree) == ["packages/plans/src/vescale_plans/utils.py: name it for what it holds"]


def test_a_test_file_in_no_target(tree):
    write(tree / "packages/plans/tests/deep/test_plan.py", "")
    assert findings(tree) == ["packages/plans/tests/deep/test_plan.py: is in 0 Bazel targets, not in one"]


def test_a_test_file_in_two_targets(tree):
    build = tree / "packages/dtensor/BUILD"
    build.write_text(build.read_text() + "pytest_suites(name = 'more', deps = [], suites = ['values'])\n")
    assert findings(tree)[0] == "packages/dtensor/tests/test_other.py: is in 2 Bazel targets, not in one"


def test_a_package_that_the_readme_does_not_show(tree):
    write(tree / "README.md", "".join(f"[it](packages/{name}/README.md)" for name in IMPORTS if name != "plans"))
    (tree / "packages/plans/CHANGELOG.md").unlink()
    assert findings(tree) == [
        "packages/plans: has no CHANGELOG.md",
        "README.md: does not link packages/plans/README.md",
    ]


@pytest.mark.parametrize("folder", ["packages/dtensor/src/vescale_dtensor/_many", "tools/many", "benchmarks"])
def test_a_folder_of_many_modules(tree, folder):
    for number in range(16):
        write(tree / folder / f"one_{number}.py", "")
    assert f"{folder}: 16 modules, more than 15; give some a folder" in findings(tree)


@pytest.mark.parametrize(
    "second",
    [
        "from .first import one\n",
        "def late():\n    from . import first\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vescale_plans.first\n",
    ],
)
def test_modules_that_need_each_other(tree, second):
    source = tree / "packages/plans/src/vescale_plans"
    write(source / "first.py", "from .inner.second import two\n")
    write(source / "inner/__init__.py", "")
    write(source / "inner/second.py", second.replace("from .", "from .."))
    (found,) = findings(tree)
    assert found.splitlines() == [
        "packages/plans: an import cycle, of 2 modules",
        "  vescale_plans.first -> vescale_plans.inner.second",
        "  vescale_plans.inner.second -> vescale_plans.first",
    ]


@pytest.mark.parametrize("source", ["from vescale_testkit import run_ranks\n", "import vescale_testkit.oracle\n"])
@pytest.mark.parametrize("package", ["dtensor", "vescale"])
def test_what_a_training_runs_imports_no_test_kit(tree, package, source):
    file = f"packages/{package}/src/{'vescale' if package == 'vescale' else 'vescale_dtensor'}/odd.py"
    write(tree / file, source)
    assert {
        f"packages/{package}: imports testkit, which its row in docs/design.md does not allow",
        f"{file}:1: imports the test kit",
    } <= {*findings(tree)}


def test_the_test_kit_sees_the_insides_of_what_it_pins(tree):
    write(tree / "packages/testkit/src/vescale_testkit/own.py", "from vescale_dtensor._a import b\n")
    assert findings(tree) == []
    edit(tree / "packages/testkit/pyproject.toml", "==0.1.0", ">=0.1,<0.3")
    (finding,) = findings(tree)
    assert finding.endswith("own.py:1: imports vescale_dtensor._a.b, which is private there")


PRIVATE = """\
from torch.distributed import distributed_c10d

# The store. Instead: a public name of it.
store_of = distributed_c10d._get_default_store
"""


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch._C._current_graph_task_id()\n",
        "from torch._C import _current_graph_task_id\n",
        "def late():\n    from torch._dynamo.exc import UserError\n",
        "import torch.utils._pytree as pytree\n",
        "from torch import Tensor\nversion = Tensor._version.__get__\n",
        "from torch.autograd import Variable\nVariable._execution_engine.queue_callback(print)\n",
        "import torch\nfound = getattr(torch, '_foreach_mm', None)\n",
    ],
)
def test_private_parts_of_torch_are_for_one_module(tree, source):
    write(tree / "packages/dtensor/src/vescale_dtensor/odd.py", source)
    (found,) = [finding for finding in findings(tree) if "private parts of torch" in finding]
    assert found.startswith("packages/dtensor/src/vescale_dtensor/odd.py:")


@pytest.mark.parametrize(
    "source", ["import torch\nx = torch.ops.aten._to_copy.default\n", "import torch\ny = torch.Tensor.__add__\n"]
)
def test_operators_and_methods_of_python_are_no_private_parts(tree, source):
    write(tree / "packages/dtensor/src/vescale_dtensor/plain.py", source)
    assert findings(tree) == []


def test_each_private_part_is_used_and_says_what_would_replace_it(tree):
    source = tree / "packages/dtensor/src/vescale_dtensor"
    write(source / "_torch_private.py", PRIVATE)
    write(source / "collectives.py", "from ._torch_private import store_of\n")
    assert findings(tree) == []

    write(source / "_torch_private.py", PRIVATE.replace(" Instead: a public name of it.", ""))
    (found,) = findings(tree)
    assert "store_of does not say what would replace it" in found

    write(source / "_torch_private.py", PRIVATE + "\nother_store_of = distributed_c10d._get_default_store\n")
    assert [finding.partition(": ")[2] for finding in findings(tree)] == [
        "other_store_of does not say what would replace it ('Instead:')", "nothing imports other_store_of",
    ]  # fmt: skip


def test_a_private_part_of_torch_distributed_is_for_modules_that_communicate(tree):
    source = tree / "packages/dtensor/src/vescale_dtensor"
    write(source / "_torch_private.py", PRIVATE)
    write(source / "layout.py", "from ._torch_private import store_of\n")
    (found,) = findings(tree)
    assert found.endswith("uses store_of of torch.distributed, and is not one of the modules that communicate")
