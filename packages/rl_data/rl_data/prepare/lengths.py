"""Lengths of prompts and responses, in tokens as the apps count them, or in characters."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from ..config import DataConfig
from ..errors import DataError
from ..files.table import OnBad
from ..prompts import Renderer, encode
from ..tokenizer import load_tokenizer
from .layouts import Sample

Measured = tuple[Sample, int, int]
"""A sample, the length of its prompt and that of its response (0 without one)."""


class Measure(Protocol):
    """Measures samples; `on_bad` takes the errors of those that cannot be rendered, which are left out."""

    unit: str

    def __call__(self, samples: Sequence[Sample], on_bad: OnBad) -> list[Measured]: ...


def make_measure(tokenizer: str | None) -> Measure:
    """Measures in tokens of the model folder `tokenizer`; None: in characters. Raises ModelFolderError."""
    return _Characters() if tokenizer is None else _Tokens(tokenizer)


class _Characters:
    unit = "characters"

    def __call__(self, samples: Sequence[Sample], on_bad: OnBad) -> list[Measured]:
        return [(sample, len(sample.prompt_text), len(sample.response_text)) for sample in samples]


class _Tokens:
    unit = "tokens"

    def __init__(self, folder: str) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._render = Renderer(self._tokenizer, DataConfig())

    def __call__(self, samples: Sequence[Sample], on_bad: OnBad) -> list[Measured]:
        rendered = list(self._rendered(samples, on_bad))
        if not rendered:
            return []
        prompts = self._render.encode([text for _, text in rendered])
        responses = encode([sample.response_text for sample, _ in rendered], self._tokenizer, add_special_tokens=False)
        return [
            (sample, len(prompt), len(response))
            for (sample, _), prompt, response in zip(rendered, prompts, responses, strict=True)
        ]

    def _rendered(self, samples: Sequence[Sample], on_bad: OnBad) -> Iterator[tuple[Sample, str]]:
        for sample in samples:
            try:
                text = self._render(sample.row.messages, sample.row.tools, sample.row.place)
            except DataError as error:
                on_bad(error)
                continue
            yield sample, text
