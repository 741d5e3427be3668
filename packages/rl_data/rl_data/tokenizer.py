"""Model folders and their tokenizers: checks by file name, without heavy imports, and loading."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from .errors import DataError, ModelFolderError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
_MOST_NAMED = 3
"""Differing ids that an error names."""


class TokenizerLike(Protocol):
    """The part of a Hugging Face tokenizer that this package uses."""

    @property
    def chat_template(self) -> Any: ...
    @property
    def eos_token(self) -> Any: ...
    @property
    def eos_token_id(self) -> Any: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> Mapping[str, Any]: ...
    def apply_chat_template(
        self,
        conversation: list[Mapping[str, Any]],
        *,
        tools: list[Mapping[str, Any]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> Any: ...


def find_model_folder(path: str | Path) -> Path:
    """The model folder of `path`: the path itself, or for OWNER/NAME the folder where `hf download` stored that model.

    Nothing is downloaded. A path that does not exist is returned unchanged; `check_model_folder` then fails for it.
    """
    if os.path.exists(path) or str(path).count("/") != 1:
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return Path(path)


def check_model_folder(path: str | Path, *, need_weights: bool = True) -> Path:
    """Check, by file names only, that `path` is a Hugging Face model folder; return it.

    Raises ModelFolderError, with the remedy, if the folder, its config.json, its tokenizer or (unless need_weights is
    False) its weights are missing.
    """
    folder, name = Path(path), str(path)
    if not os.path.isdir(folder):  # False too for names that no folder can have, where Path.is_dir raises
        what = "is a file, not a folder" if os.path.exists(folder) else "no such folder"
        fetched = "OWNER/NAME after `hf download OWNER/NAME`"
        if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
            what, fetched = f"{what}, and no model of this name was downloaded", f"fetch it with `hf download {name}`"
        raise ModelFolderError(f"{name}: {what}. Give a local Hugging Face model folder, or {fetched}.", file=name)
    if not (folder / "config.json").is_file():
        raise ModelFolderError(
            f"{name}: has no config.json, so it is not a Hugging Face model folder. Give the folder that "
            "save_pretrained or a download wrote.",
            file=name,
        )
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelFolderError(
            f"{name}: has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}). Copy the tokenizer files of the base "
            "model into it, or run tokenizer.save_pretrained on the folder.",
            file=name,
        )
    if need_weights and not any(next(folder.glob(pattern), None) for pattern in _WEIGHT_PATTERNS):
        raise ModelFolderError(
            f"{name}: has no weights (no {', '.join(_WEIGHT_PATTERNS)} file). Copy the *.safetensors files of the "
            "model into it.",
            file=name,
        )
    return folder


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder (a transformers PreTrainedTokenizer).

    Raises ModelFolderError if the folder has no tokenizer, if it cannot be loaded, or if it has no end-of-sequence
    token, which ends every response.
    """
    folder = check_model_folder(path, need_weights=False)
    from transformers import AutoTokenizer

    try:
        # Without the option, transformers asks at the terminal whether to run code of the folder.
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a broken tokenizer file
        raise ModelFolderError(
            f"{folder}: the tokenizer cannot be loaded ({type(error).__name__}: {str(error).splitlines()[0]}). Copy "
            "the tokenizer files of the base model into the folder again.",
            file=str(folder),
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelFolderError(
            f"{folder}: the tokenizer has no end-of-sequence token. Set `eos_token` in tokenizer_config.json.",
            file=str(folder),
        )
    return tokenizer


def check_same_vocabulary(tokenizer: Any, other: Any) -> None:
    """Check that each id is the same token in both, added tokens too, and that responses end with the same id.

    Names, classes, chat templates and padding tokens do not matter: ids are all that the models exchange.

    Raises DataError, with the first ids that differ.
    """
    ours, theirs = _tokens(tokenizer), _tokens(other)
    differing = [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]
    if differing:
        listed = "; ".join(f"id {i} is {_name(ours, i)} and {_name(theirs, i)}" for i in differing[:_MOST_NAMED])
        raise DataError(
            f"the vocabularies differ in {len(differing)} of {len(ours.keys() | theirs.keys())} ids: {listed}"
        )
    if tokenizer.eos_token_id != other.eos_token_id:
        raise DataError(
            f"responses end with id {tokenizer.eos_token_id} ({tokenizer.eos_token}) and with id {other.eos_token_id} "
            f"({other.eos_token}); set `eos_token` in one tokenizer_config.json"
        )


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _name(tokens: dict[int, str], index: int) -> str:
    return repr(tokens[index]) if index in tokens else "no token"
