"""The model of `vescale train`: a HuggingFace one, or a function of the user's."""

from __future__ import annotations

import importlib
import os
import sys

from torch import nn

import vescale

from .config import ConfigError, Model


def build(config: Model) -> tuple[nn.Module, str | None]:
    """Returns the model, its parameters not made yet where that can be, and the folder of weights to load, or None."""
    if config.name is not None and ":" in config.name:
        module, _, function = config.name.partition(":")
        sys.path.insert(0, os.getcwd())
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            rule, mend = f"model.name = {config.name!r} cannot be imported: {error}", ("python -c 'import ...'", "")
            raise ConfigError("vescale train", rule, (), [mend]) from error
        finally:
            sys.path.remove(os.getcwd())
        with vescale.deferred_init():
            return make(**config.config), None
    import transformers

    try:
        if config.type is not None:
            settings = transformers.AutoConfig.for_model(config.type, **config.config)
        else:
            settings = transformers.AutoConfig.from_pretrained(config.name, **config.config)
    except Exception as error:  # of many types
        rule = f"[model] names no configuration of transformers: {error}"
        raise ConfigError("vescale train", rule, (), [('type = "llama"', "with random weights")]) from error
    settings.use_cache = False
    if config.lora:
        import peft

        kind = transformers.AutoModelForCausalLM
        has_weights = config.name is not None and config.weights
        model = kind.from_pretrained(config.name, config=settings) if has_weights else kind.from_config(settings)
        return peft.get_peft_model(model, peft.LoraConfig(**config.lora)), None
    with vescale.deferred_init():
        model = transformers.AutoModelForCausalLM.from_config(settings)
    if config.name is None or not config.weights:
        return model, None
    if os.path.isdir(config.name):
        return model, config.name
    from huggingface_hub import snapshot_download

    return model, snapshot_download(config.name, allow_patterns=["*.safetensors", "*.json"])
