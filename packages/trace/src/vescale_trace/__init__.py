"""What the packages of veScale share below their tensors and pipelines."""

from ._version import __version__ as __version__
from .errors import VescaleError as VescaleError
