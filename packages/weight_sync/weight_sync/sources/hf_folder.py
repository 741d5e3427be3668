"""Source for the safetensors files of a Hugging Face model folder."""

from pathlib import Path

import torch
from torch import Tensor

from plinth_base.dtypes import DTYPE_BYTES
from plinth_base.model_folder import ModelFolderError, safetensors_headers

from ..errors import SourceError
from ..manifest import TensorEntry, WeightManifest
from ..plan import Bucket
from .base import staged


class HfFolderSource:
    """The safetensors files of a Hugging Face model folder, sent unchanged. Raises SourceError for unreadable files."""

    def __init__(self, path: str | Path) -> None:
        self._files: dict[str, tuple[Path, int]] = {}
        entries = []
        try:
            headers = safetensors_headers(path)
        except ModelFolderError as error:
            raise SourceError(error.problem, value=error.value, remedy=error.remedy) from error
        if not headers:
            raise SourceError("the folder has no model.safetensors and no index of one", value=str(path))
        for file, header in headers.items():
            for name, stored in header.items():
                if stored.dtype not in DTYPE_BYTES:
                    raise SourceError(f"{name} has dtype {stored.dtype}, which cannot be sent", value=str(file))
                self._files[name] = (file, stored.start)
                entries.append(TensorEntry(name=name, shape=stored.shape, dtype=stored.dtype))
        self._manifest = WeightManifest.of(entries)

    def manifest(self) -> WeightManifest:
        """The tensors of all files: files by name, tensors by position in the file."""
        return self._manifest

    def fill(self, bucket: Bucket, out: Tensor | None) -> None:
        """Raises SourceError when a file is shorter than its header says."""
        if out is None:
            return
        with staged(bucket, out, torch.device("cpu")) as host:
            for slot in bucket.slots:
                file, start = self._files[slot.name]
                with file.open("rb") as stream:
                    stream.seek(start)
                    target = memoryview(host[slot.offset : slot.offset + slot.nbytes].numpy().data)
                    if stream.readinto(target) != slot.nbytes:
                        raise SourceError(f"the file ends within {slot.name}", value=str(file))
