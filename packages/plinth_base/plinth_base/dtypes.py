"""Names of dtypes as in torch, and bytes per element. Does not import torch, so that plans can use it."""

from typing import Literal

Dtype = Literal["bfloat16", "float16", "float32"]
"""Dtypes of models in training."""

_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
DTYPE_BYTES = dict(_DTYPES.values())
"""Bytes per element of the dtypes that tensors of a model can have."""
SAFETENSORS_DTYPES = {code: name for code, (name, _) in _DTYPES.items()}
"""torch's names by those in the header of a safetensors file."""
