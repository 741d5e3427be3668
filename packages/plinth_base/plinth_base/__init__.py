"""Shared parts of the Plinth packages: errors with fields, the fence, dtypes, endpoints, model folders, adapters."""

from .dtypes import DTYPE_BYTES, Dtype, dtype_bytes
from .endpoint import Endpoint
from .errors import PlinthError, prefix_fields
from .model_folder import ModelFolderError, check_model_folder, find_model_folder

__all__ = [
    "DTYPE_BYTES",
    "Dtype",
    "Endpoint",
    "ModelFolderError",
    "PlinthError",
    "check_model_folder",
    "dtype_bytes",
    "find_model_folder",
    "prefix_fields",
]
