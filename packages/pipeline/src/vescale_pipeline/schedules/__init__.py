"""Generators of schedules: pure functions from ranks, microbatches and virtual stages to actions."""

from .generate import GENERATORS as GENERATORS
from .generate import generate as generate
