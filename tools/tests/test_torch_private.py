"""Each package's list of torch's private names: the installed torch has them, and what it lacks is named."""

from pathlib import Path

import pytest

from checks import torch_private
from package_tree import read_packages

TOP = Path(__file__).absolute().parents[2]
PACKAGES = {package.name: package for package in read_packages(TOP)}


@pytest.mark.parametrize("name", sorted(PACKAGES.keys() - {"trace"}))  # which names nothing private
def test_torch_has_every_private_name_that_a_package_uses(name):
    path = torch_private.private_module(PACKAGES[name])
    assert path is not None and torch_private.entries(path)
    assert torch_private.lacking(path) == []


def test_what_torch_lacks_is_named_where_it_is_bound_and_where_it_is_imported_late(tmp_path):
    path = tmp_path / "_torch_private.py"
    path.write_text(
        "import torch\n"
        "from torch import Tensor\n"
        "from torch.utils import _pytree\n"
        "there = torch._C._current_graph_task_id\n"
        "gone = torch._C._gone_with_a_version\n"
        "method = Tensor._gone_method.__get__\n"
        "flatten = _pytree.gone_flatten\n"
        'may_be_gone = getattr(torch, "_gone_but_for_later_versions", None)\n'
        "def late():\n"
        "    from torch._gone.exc import Gone\n"
        "    from torch.distributed._composable.contract import STATE_KEY\n"
        "    return Gone, STATE_KEY\n"
    )
    assert torch_private.lacking(path) == [
        "torch.Tensor._gone_method.__get__", "torch._C._gone_with_a_version", "torch._gone.exc.Gone",
        "torch.utils._pytree.gone_flatten",
    ]  # fmt: skip
