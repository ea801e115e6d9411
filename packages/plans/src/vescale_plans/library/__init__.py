"""Plans by hand for model families: `gpt`, `llama`, `mixtral`."""

from .gpt import gpt as gpt
from .llama import llama as llama
from .mixtral import mixtral as mixtral
