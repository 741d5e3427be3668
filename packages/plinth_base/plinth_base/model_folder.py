"""Hugging Face model folders: where a download is, and checks by file names, without heavy imports."""

import os
import re
from pathlib import Path

from .errors import PlinthError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""A tokenizer has at least one of these."""
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
"""Weights have at least one file of these."""


class ModelFolderError(PlinthError, ValueError):
    """A model folder does not exist, or has no config, tokenizer or weights. `value` is the path."""


def find_model_folder(path: str | Path) -> Path:
    """The model folder of `path`: the path itself, or for OWNER/NAME the folder where `hf download` stored that model.

    Nothing is downloaded. A path that does not exist is returned unchanged; `check_model_folder` then fails for it.
    """
    if os.path.exists(path) or str(path).count("/") != 1:
        return Path(path)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:  # then nothing was downloaded with it either
        return Path(path)
    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return Path(path)


def check_model_folder(path: str | Path, *, need_weights: bool = True) -> Path:
    """Check, by file names only, that `path` is a Hugging Face model folder; return it.

    Raises:
        ModelFolderError: the folder, its config.json, its tokenizer or (if `need_weights`) its weights are missing.
    """
    folder, name = Path(path), str(path)
    if not os.path.isdir(path):  # False too for names that no folder can have, where Path.is_dir raises
        problem = "is a file, not a folder" if os.path.exists(folder) else "no such folder"
        remedy = "give a local Hugging Face model folder, or OWNER/NAME after `hf download OWNER/NAME`"
        if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
            problem += ", and no model of this name was downloaded"
            remedy = f"give a local Hugging Face model folder, or fetch it with `hf download {name}`"
        raise ModelFolderError(problem, value=name, remedy=remedy)
    if not (folder / "config.json").is_file():
        raise ModelFolderError(
            "the folder has no config.json, so it is not a Hugging Face model folder",
            value=name,
            remedy="give the folder that save_pretrained or a download wrote",
        )
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ModelFolderError(
            f"the folder has no tokenizer (none of {', '.join(TOKENIZER_FILES)})",
            value=name,
            remedy="copy the tokenizer files of the base model into it, or run tokenizer.save_pretrained on the folder",
        )
    if need_weights and not any(next(folder.glob(pattern), None) for pattern in WEIGHT_PATTERNS):
        raise ModelFolderError(
            f"the folder has no weights (no {', '.join(WEIGHT_PATTERNS)} file)",
            value=name,
            remedy="copy the *.safetensors files of the model into it",
        )
    return folder
