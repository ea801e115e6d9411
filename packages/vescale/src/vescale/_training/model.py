"""The model of `vescale train`: a HuggingFace one, or a function of the user's."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

from torch import nn

import vescale

from ..pretrained import folder_of
from .config import ConfigError, Model, library


def build(config: Model, *, runs: bool = True) -> nn.Module:
    """Returns the model, its parameters not made yet where they can be made or loaded later: see `weights_of`.

    runs: False for a model of which only shapes count.
    """
    if config.is_function:
        module, _, function = str(config.name).partition(":")
        sys.path.insert(0, os.getcwd())
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            rule, mend = f"model.name = {config.name!r} cannot be imported: {error}", ("python -c 'import ...'", "")
            raise ConfigError("vescale train", rule, (), [mend]) from error
        finally:
            sys.path.remove(os.getcwd())
        with vescale.deferred_init():
            return make(**config.config)
    transformers = library("transformers")
    kind = transformers.AutoModelForCausalLM
    try:
        if config.type is not None:
            settings = transformers.AutoConfig.for_model(config.type, **config.config)
        else:
            settings = transformers.AutoConfig.from_pretrained(config.name, **config.config)
        settings.use_cache = False
        if config.lora and runs and config.name is not None and config.weights:
            model = kind.from_pretrained(config.name, config=settings)
        else:
            with vescale.deferred_init():
                model = kind.from_config(settings)
    except Exception as error:  # of many types
        rule = f"[model] names no model of transformers: {str(error).splitlines()[0]}"
        raise ConfigError("vescale train", rule, (), [('type = "llama"', "with random weights")]) from error
    if not config.lora:
        return model
    peft = library("peft")
    with contextlib.nullcontext() if runs and config.weights else vescale.deferred_init():
        return peft.get_peft_model(model, peft.LoraConfig(**config.lora))


def weights_of(config: Model) -> str | None:
    """Returns the folder of the weights that a model of `build` has yet to load; None where they are its own."""
    if config.published is None or not config.weights or config.lora:
        return None
    library("huggingface_hub")
    try:
        return folder_of(config.published)
    except Exception as error:  # of the hub's, of many types
        rule = f"model.name = {config.name!r} is no folder, and the hub does not give it: {str(error).splitlines()[0]}"
        raise ConfigError(
            "vescale train", rule, (), [("weights = false", "random ones"), ('name = "folder"', "")]
        ) from error
