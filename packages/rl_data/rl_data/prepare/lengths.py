"""Lengths of prompts and responses, in tokens as the apps count them, or in characters."""

from collections.abc import Iterator, Sequence

from ..config import DataConfig
from ..errors import DataError
from ..files.table import OnBad
from ..rendering import Renderer, encode
from ..tokenizer import load_tokenizer
from .layouts import Sample

Measured = tuple[Sample, int, int]
"""A sample, the length of its prompt and that of its response (0 without one)."""


class Measure:
    """Measures in tokens of the model folder `tokenizer`; None: in characters. Raises ModelFolderError."""

    def __init__(self, tokenizer: str | None) -> None:
        self.unit, self._render = "characters", None
        if tokenizer is not None:
            self._tokenizer = load_tokenizer(tokenizer)
            self.unit, self._render = "tokens", Renderer(self._tokenizer, DataConfig())

    def __call__(self, samples: Sequence[Sample], on_bad: OnBad) -> list[Measured]:
        """Measure samples; `on_bad` takes the errors of those that cannot be rendered, which are left out."""
        if self._render is None:
            return [(sample, len(sample.prompt_text), len(sample.response_text)) for sample in samples]
        rendered = list(_rendered(samples, self._render, on_bad))
        if not rendered:
            return []
        prompts = self._render.encode([text for _, text in rendered])
        responses = encode([sample.response_text for sample, _ in rendered], self._tokenizer, add_special_tokens=False)
        return [
            (sample, len(prompt), len(response))
            for (sample, _), prompt, response in zip(rendered, prompts, responses, strict=True)
        ]


def _rendered(samples: Sequence[Sample], render: Renderer, on_bad: OnBad) -> Iterator[tuple[Sample, str]]:
    for sample in samples:
        try:
            yield sample, render(sample.row.messages, sample.row.tools, sample.row.place)
        except DataError as error:
            on_bad(error)
