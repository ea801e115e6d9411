"""Published weights: read straight into shards, and written under the names that they are published by.

transformers holds some parameters otherwise than they are published: experts in stacks, gate and up in one. It says
itself how a state is written under the published names; of tensors without values this gives views, each of which
tells its place in a parameter.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import vescale_checkpoint
from vescale_plans import Plan, PlanError
from vescale_rng import deferred_init
from vescale_trace.arguments import typed_call

from ._stages import parallelize

Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A published name, where its tensor begins in a parameter, and its shape."""
_FLOATS = ("float32", "bfloat16", "float16", "float64")

if TYPE_CHECKING:  # one signature for both
    from vescale_checkpoint import export_huggingface as export_huggingface
    from vescale_checkpoint import load as load
else:

    @functools.wraps(vescale_checkpoint.load)
    @typed_call
    def load(path: Any, state: Any, *, join: Any = None, **options: Any) -> Any:
        join = functools.partial(_joined, state) if join is None else join
        return vescale_checkpoint.load(path, state, join=join, **options)

    @functools.wraps(vescale_checkpoint.export_huggingface)
    @typed_call
    def export_huggingface(path: Any, model: Any, *, places: Any = None, **options: Any) -> None:
        places = places_of(model) if places is None else places
        vescale_checkpoint.export_huggingface(path, model, places=places, **options)


def from_pretrained(
    name: str | os.PathLike[str],
    plan: Plan | Any,
    optimizer_fn: Any = None,
    *,
    dtype: torch.dtype | None = None,
    kind: Any = None,
    config: Mapping[str, Any] | None = None,
    missing: str = "error",
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Returns a published model of transformers, sharded by `plan`, and its optimizer. Each rank reads the bytes of its
    own shards, and holds no more than these. Call it on every rank.

    Arguments:
        name: a folder of safetensors, or a name on HuggingFace's hub.
        plan, optimizer_fn, options: as for `parallelize`: a plan, transformers' `DistributedConfig`, accelerate's
            `ParallelismConfig`, or a function of the model, such as one that calls `generate_plan`.
        dtype: of the parameters; by default that of the configuration. What the files hold is converted.
        kind: the class of the model, or one of transformers' `Auto` classes; by default what the configuration names.
        config: fields of the configuration to change.
        missing: "keep" leaves what the files lack (a new head) as the model makes it.

    The model is in evaluation mode, as transformers' `from_pretrained` returns it.

    Raises PlanError for a name that is no model, and as `parallelize` and `load` do. Communication: as these.
    """
    try:
        import transformers
        from transformers.initialization import no_init_weights

        folder = folder_of(name)
        settings = transformers.AutoConfig.from_pretrained(folder, **(config or {}))
        kind = kind or getattr(transformers, (settings.architectures or [""])[0], transformers.AutoModelForCausalLM)
        with deferred_init(), no_init_weights() if missing == "error" else contextlib.nullcontext():
            make = getattr(kind, "from_config", None) or kind._from_config
            model = make(settings, **({} if dtype is None else {"dtype": dtype}))
            model.tie_weights()
    except (ImportError, OSError, ValueError) as error:
        rule = f"{str(name)!r} gives no model of transformers: {str(error).splitlines()[0]}"
        remedies = [('vescale.from_pretrained("./folder", plan)', "with a config.json and safetensors")]
        raise PlanError("from_pretrained", rule, (), remedies) from error
    model, optimizer = parallelize(plan, model, optimizer_fn, **options)
    wanted = {str(one.dtype).removeprefix("torch.") for one in model.parameters()}
    cast = [f"{one}->{other}" for one in _FLOATS for other in wanted if one != other]
    load(folder, {"model": model}, cast=cast, missing=missing, extra="ignore")
    if hasattr(model, "generation_config") and os.path.exists(f"{folder}/generation_config.json"):
        model.generation_config = type(model.generation_config).from_pretrained(folder)
    return model.eval(), optimizer


def folder_of(name: str | os.PathLike[str]) -> str:
    """Returns the folder of published weights; a name on HuggingFace's hub is fetched."""
    if os.path.isdir(name):
        return os.fspath(name)
    from huggingface_hub import snapshot_download

    return snapshot_download(str(name), allow_patterns=["*.safetensors", "*.json"])


def places_of(model: Any) -> dict[str, list[Place]]:
    """Returns what transformers publishes of each parameter that has another name there, or several."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {}
    from transformers.core_model_loading import revert_weight_conversion

    whole = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in model.state_dict().items()}
    names = {id(one): name for name, one in whole.items()}
    places: dict[str, list[Place]] = {}
    with _Views():
        published_as = revert_weight_conversion(model, dict(whole))
    for published, view in published_as.items():
        base = view if id(view) in names else view._base
        name = names.get(id(base))
        if name is None or name == published or view.stride() != base.stride()[base.ndim - view.ndim :]:
            continue  # one that is computed has no place
        begin = torch.unravel_index(torch.tensor(view.storage_offset()), base.shape)
        places.setdefault(name, []).append((published, tuple(map(int, begin)), tuple(view.shape)))
    return places


class _Views(TorchFunctionMode):
    """Parts of a tensor stay views of it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is torch.Tensor.contiguous else function(*args, **(kwargs or {}))


def _joined(state: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Returns what a checkpoint holds under published names, for `load`."""
    joined: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for key, model in state.items():
        if not (prefix := getattr(model, "base_model_prefix", "")):
            continue
        prefix += "."
        missing = {name: one for name, one in model.state_dict().items() if f"{key}.{name}" not in shapes}
        places = places_of(model) if missing else {}
        for name, one in missing.items():
            begin = (0,) * one.ndim  # a model's base is published without the model, or the model for the base
            ways = (
                [places[name]] if name in places else [[(name.removeprefix(prefix), begin)], [(prefix + name, begin)]]
            )
            for parts in ([(f"{key}.{published}", begin) for published, begin, *_ in way] for way in ways):
                if all(part in shapes for part, _ in parts):
                    joined.setdefault(f"{key}.{name}", parts)
    return joined
