"""Characters of rows that a tokenizer loses: it drops bytes that its vocabulary lacks, without an error."""

import logging
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from .files.table import Place
from .tokenizer import Tokenizer

_MOST_NAMED = 8
_WHITE_CONTROLS = "\t\n\v\f\r\x85"
"""The control characters that are white space in Unicode (`str.isspace` takes four more)."""
_logger = logging.getLogger(__name__)


class LostCharacters:
    """Counts the characters of texts that their token ids do not decode to.

    White space, case and compatibility forms (NFKD) are not compared: tokenizers normalize them. A text is decoded only
    if it has an unknown token or a character that does not come back alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._safe, self._doubtful = set[str](), set[str]()
        self._lost = Counter[str]()
        self._num_rows, self._last, self._first = 0, "", ""

    def check(self, text: str, ids: Sequence[int], place: Place, column_of: Callable[[Collection[str]], str]) -> None:
        """Counts what `ids` lack of a text of this row; `column_of` gives the column that has such characters."""
        if not (lost := self.lost(text, ids)):
            return
        self._lost += lost
        self._num_rows += str(place) != self._last
        self._last = str(place)
        self._first = self._first or f"{place}, column {column_of(lost)!r}"

    def lost(self, text: str, ids: Sequence[int]) -> Counter[str]:
        """The characters of a text, as `compared`, that its token ids lack."""
        characters = set(text)
        if new := characters - self._safe - self._doubtful:
            self._doubtful |= {one for one in new if self._missing(one, self._encode(one))}
            self._safe |= new - self._doubtful
        if characters.isdisjoint(self._doubtful) and self._tokenizer.unk_token_id not in ids:
            return Counter()
        return self._missing(text, ids)

    def report(self) -> None:
        """Log the lost characters, if there are any."""
        if not self._lost:
            return
        named = ", ".join(f"{one!r} ({count})" for one, count in self._lost.most_common(_MOST_NAMED))
        more = f" and {len(self._lost) - _MOST_NAMED} others" if len(self._lost) > _MOST_NAMED else ""
        _logger.warning(
            "the tokenizer has no token for characters of %d %s, which the model does not see: %s%s (first: %s). "
            "Remove them, or use a model whose tokenizer has them",
            self._num_rows,
            "row" if self._num_rows == 1 else "rows",
            named,
            more,
            self._first,
        )

    def _encode(self, text: str) -> Sequence[int]:
        [ids] = self._tokenizer([text], add_special_tokens=False)["input_ids"]
        return list(ids)

    def _missing(self, text: str, ids: Sequence[int]) -> Counter[str]:
        unknown = self._tokenizer.unk_token_id
        if unknown is not None and self._tokenizer.unk_token not in text:
            ids = [one for one in ids if one != unknown]  # its name has letters, too
        decoded = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return compared(text) - compared(decoded)


def compared(text: str) -> Counter[str]:
    """The characters of a text that its tokens have to show, in their normal form."""
    normal = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    counts = Counter(normal)
    for one in [one for one in counts if one in _WHITE_CONTROLS or unicodedata.category(one).startswith("Z")]:
        del counts[one]
    return counts
