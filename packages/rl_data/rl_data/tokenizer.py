"""Tokenizers of model folders, and the comparison of their vocabularies."""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from plinth_base.model_folder import ModelFolderError, check_model_folder, find_model_folder

from .errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
_MOST_NAMED = 3
"""Differing ids that an error names."""


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
        problem = f"the tokenizer cannot be loaded ({type(error).__name__}: {str(error).splitlines()[0]})"
        remedy = "copy the tokenizer files of the base model into the folder again"
        raise ModelFolderError(problem, value=str(folder), remedy=remedy) from error
    if tokenizer.eos_token_id is None:
        problem = "the tokenizer has no end-of-sequence token"
        raise ModelFolderError(problem, value=str(folder), remedy="set `eos_token` in tokenizer_config.json")
    return tokenizer


def has_chat_template(path: str | Path) -> bool:
    """True for a model folder with a chat template, by its files. Raises ModelFolderError for another folder."""
    folder = check_model_folder(find_model_folder(path), need_weights=False)
    if (folder / "chat_template.jinja").is_file():
        return True
    with suppress(OSError, ValueError):  # a folder without it, or a damaged file, which `load_tokenizer` refuses
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    return False


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
            f"({other.eos_token})",
            "Set `eos_token` in one tokenizer_config.json.",
        )


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _name(tokens: dict[int, str], index: int) -> str:
    return repr(tokens[index]) if index in tokens else "no token"
