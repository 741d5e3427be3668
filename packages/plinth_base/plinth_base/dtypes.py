"""Names of dtypes as in torch, and bytes per element. Does not import torch, so that plans can use it."""

from typing import Literal

Dtype = Literal["bfloat16", "float16", "float32"]
"""Dtypes of models in training."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of the dtypes that tensors of a model can have."""


SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""torch's names by those in the header of a safetensors file."""


def dtype_bytes(dtype: str) -> int:
    """Bytes per element. Raises KeyError for a dtype that DTYPE_BYTES lacks."""
    return DTYPE_BYTES[dtype]
