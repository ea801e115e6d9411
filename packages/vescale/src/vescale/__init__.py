"""veScale in one import: the public names of its packages, under one name."""

from ._version import __version__ as __version__
