"""Compares the vocabularies of two tokenizers, for models that exchange token ids."""

from typing import Any

from .errors import DataError

_MOST_NAMED = 3


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
