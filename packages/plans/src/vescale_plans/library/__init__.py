"""Plans by hand for model families: `gpt`, `llama`."""

from .gpt import gpt as gpt
from .llama import llama as llama
