"""Foundations shared by the packages of veScale, below tensors and pipelines."""

from ._version import __version__ as __version__
from .errors import VescaleError as VescaleError
