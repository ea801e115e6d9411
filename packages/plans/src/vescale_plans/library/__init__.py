"""Plans by hand for model families: `gpt`, `llama`, `mixtral`."""

from .families import gpt as gpt
from .families import llama as llama
from .families import mixtral as mixtral
