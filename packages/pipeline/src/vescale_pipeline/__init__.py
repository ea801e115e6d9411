"""Pipeline parallelism without a graph. Today this package holds only its version: see its README."""

from ._version import __version__ as __version__
