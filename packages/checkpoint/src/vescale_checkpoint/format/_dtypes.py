"""The dtypes of torch: their names, their sizes, their names in safetensors files, and which casts lose nothing."""

from __future__ import annotations

import itertools

import torch

# torch's name -> (dtype, name in a safetensors file). What safetensors does not know lies there as bytes, "U8", with
# the element's bytes as a further dim.
_TABLE = {
    "float64": (torch.float64, "F64"),
    "float32": (torch.float32, "F32"),
    "float16": (torch.float16, "F16"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float8_e5m2": (torch.float8_e5m2, "F8_E5M2"),
    "float8_e4m3fn": (torch.float8_e4m3fn, "F8_E4M3"),
    "int64": (torch.int64, "I64"),
    "int32": (torch.int32, "I32"),
    "int16": (torch.int16, "I16"),
    "int8": (torch.int8, "I8"),
    "uint64": (torch.uint64, "U64"),
    "uint32": (torch.uint32, "U32"),
    "uint16": (torch.uint16, "U16"),
    "uint8": (torch.uint8, "U8"),
    "bool": (torch.bool, "BOOL"),
    "complex64": (torch.complex64, None),
    "complex128": (torch.complex128, None),
}
DTYPES = {name: dtype for name, (dtype, _) in _TABLE.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
SAFETENSORS = {name: code for name, (_, code) in _TABLE.items() if code is not None}
FROM_SAFETENSORS = {code: name for name, code in SAFETENSORS.items()}


def header_entry(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Describes a box of this dtype for a safetensors header: code and shape."""
    code = SAFETENSORS.get(dtype)
    return ("U8", (*shape, SIZES[dtype])) if code is None else (code, shape)


def is_lossless(source: str, target: str) -> bool:
    """True if dtype `target` can represent every value of `source`."""
    return (source, target) in _LOSSLESS


def _widenings() -> set[tuple[str, str]]:
    chains = (
        ("float8_e5m2", "float16", "float32", "float64", "complex128"),
        ("float8_e4m3fn", "float16", "float32", "complex64", "complex128"),
        ("float8_e5m2", "bfloat16", "float32", "complex64"),
        ("float8_e4m3fn", "bfloat16", "float32"),
        ("bool", "int8", "int16", "int32", "int64"),
        ("bool", "uint8", "uint16", "uint32", "uint64"),
        ("uint8", "int16"),
        ("uint16", "int32"),
        ("uint32", "int64"),
        ("int8", "bfloat16"),
        ("uint8", "bfloat16"),
        ("int8", "float16"),
        ("uint8", "float16"),
        ("int16", "float32"),
        ("uint16", "float32"),
        ("int32", "float64"),
        ("uint32", "float64"),
    )
    steps = {(a, b) for chain in chains for a, b in itertools.pairwise(chain)}
    while True:
        more = {(a, d) for a, b in steps for c, d in steps if b == c} - steps
        if not more:
            return steps
        steps |= more


_LOSSLESS = _widenings()
