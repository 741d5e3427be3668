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


def dtype_bytes(dtype: str) -> int:
    """Bytes per element. Raises KeyError for a dtype that DTYPE_BYTES lacks."""
    return DTYPE_BYTES[dtype]
