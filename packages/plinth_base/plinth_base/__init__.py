"""Shared parts of the Plinth packages: errors with fields, the fence, dtypes, endpoints, model folders, adapters."""

from .dtypes import DTYPE_BYTES, SAFETENSORS_DTYPES, Dtype
from .endpoint import Endpoint
from .errors import PlinthError, prefix_fields
from .model_folder import (
    ModelFolderError,
    StoredTensor,
    check_model_folder,
    find_model_folder,
    read_model_config,
    read_safetensors_header,
    stored_tensors,
    weight_files,
)

__all__ = [
    "DTYPE_BYTES",
    "SAFETENSORS_DTYPES",
    "Dtype",
    "Endpoint",
    "ModelFolderError",
    "PlinthError",
    "StoredTensor",
    "check_model_folder",
    "find_model_folder",
    "prefix_fields",
    "read_model_config",
    "read_safetensors_header",
    "stored_tensors",
    "weight_files",
]
