"""Vocabulary of rules: for users' own kernels and `torch.library` ops (see `register_rule`)."""

from ._dispatch.signature import Signature as Signature
from ._rules.registry import Call as Call
from ._rules.registry import Decision as Decision
from ._rules.registry import Operand as Operand
from ._rules.registry import decomposed as decomposed
from ._rules.registry import traits_of as traits_of
from ._rules.traits import Trait as Trait

composite = decomposed
"""The name of before, for rules that were written with it."""
