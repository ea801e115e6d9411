"""Tensors of the state that a checkpoint holds in parts, each under a name of its own. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .._errors import MismatchError
from ..format._box import partition_fault
from ..manifest import Manifest, Section, Stored

Join = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, Sequence[tuple[str, tuple[int, ...]]]]]
"""Names in the checkpoint -> shapes, to: name in the state -> the names of its parts, and where each of them begins in
it. A part may have fewer dims: of the first ones it has one index then."""


def with_joined(manifest: Manifest, join: Join) -> Manifest:
    """The manifest with each tensor under the state's name, its parts as sections.

    Raises MismatchError for parts of different dtypes, or that are not all of a tensor.
    """
    tensors = dict(manifest.tensors)
    joined: dict[str, Stored] = {}
    for name, parts in join({name: one.shape for name, one in manifest.tensors.items()}).items():
        sections: list[Section] = []
        dtypes = set()
        for part, begin in parts:
            kept = manifest.tensors[part]
            tensors.pop(part, None)
            dtypes.add(kept.dtype)
            for section in kept.sections:
                inner = (*((0, 1),) * (len(begin) - len(kept.shape)), *section.box)
                box = tuple((low + at, high + at) for (low, high), at in zip(inner, begin, strict=True))
                sections.append(section._replace(box=box))
        shape = tuple(max(stop for _, stop in ranges) for ranges in zip(*(section.box for section in sections)))
        fault = partition_fault(shape, [section.box for section in sections])
        if fault is not None or len(dtypes) > 1:
            rule = f"the parts of {name!r} are no whole: {fault or f'their dtypes are {sorted(dtypes)}'}"
            raise MismatchError("load", rule, [f"parts  {', '.join(part for part, _ in parts[:4])}"])
        joined[name] = Stored(dtypes.pop(), shape, tuple(sections))
    return replace(manifest, tensors=tensors | joined)
