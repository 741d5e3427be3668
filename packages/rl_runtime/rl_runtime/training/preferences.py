"""Preferences on the ranks: pairs as groups of a train batch, and log-probs of a reference.

Shapes: P pairs, S = 2 P sequences (chosen, rejected, chosen, …), K targets of all sequences.
"""

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_core import Batch, pack, segment_sum
from rl_data import Demonstration, LabeledResponse, PreferencePair

from ..errors import InputError
from ..ranks.model_handle import ModelHandle
from ..ranks.train_batch import TrainBatch
from .held_out import log_probs_of
from .supervised import sequences_in


def responses_of(pairs: Sequence[PreferencePair]) -> list[Demonstration]:
    """The responses of all pairs: chosen, rejected, chosen, …"""
    return [one for pair in pairs for one in (pair.chosen, pair.rejected)]


def margins_of(pairs: Sequence[PreferencePair]) -> Tensor:
    """The margin of each pair (how much better its chosen response is), for both responses: float32 [S]."""
    return torch.tensor([pair.margin for pair in pairs for _ in range(2)], dtype=torch.float32)


def with_labels(preferences: Sequence[PreferencePair | LabeledResponse]) -> tuple[list[Demonstration], Tensor]:
    """The responses of pairs or of labeled responses, and float32 [S]: 1 for chosen and desirable ones, else 0."""
    labeled: list[tuple[Demonstration, float]] = []
    for one in preferences:
        if isinstance(one, LabeledResponse):
            labeled.append((one.response, float(one.is_desirable)))
        else:
            labeled += [(one.chosen, 1.0), (one.rejected, 0.0)]
    return [response for response, _ in labeled], torch.tensor([label for _, label in labeled], dtype=torch.float32)


def score_batch(responses: Sequence[Demonstration], values: Mapping[str, Tensor] | None = None) -> Batch:
    """A batch with one target per response, so that a value head scores it at its last token: K = S.

    Args:
        values: float32 [S] by name, per sequence.
    """
    # A target is predicted by the token before it, so a placeholder follows the last token.
    whole = [[*one.prompt_ids, *one.response_ids] for one in responses]
    return pack(whole, [[0]] * len(whole), per_sequence=values)


def log_ratios(log_probs_K: Tensor, batch: Batch) -> Tensor:
    """log p(y | x) - log p_ref(y | x) of each response of a micro batch, [S]; its values `ref` are the latter."""
    return segment_sum(log_probs_K, batch.response_lens_S) - batch.per_sequence["ref"]


def of_pairs(values_S: Tensor) -> tuple[Tensor, Tensor]:
    """The values of the chosen and of the rejected responses, [P] each."""
    return values_S[0::2], values_S[1::2]


def sequence_log_probs(model: ModelHandle, responses: Sequence[Demonstration], *, batch_size: int) -> Tensor:
    """log p(y | x) of each response, float32 [S], without gradients.

    Args:
        batch_size: responses that are sent to the ranks at once.
    """
    rows = log_probs_of(model, responses, batch_size=batch_size)
    return torch.tensor([float(row.sum(dtype=torch.float64)) for row in rows], dtype=torch.float32)


def scores(model: ModelHandle, responses: Sequence[Demonstration], *, batch_size: int) -> Tensor:
    """A value head's score at the last token of each response, float32 [S], without gradients.

    Args:
        batch_size: responses that are sent to the ranks at once.
    """
    parts = [torch.zeros(0)]
    for start in range(0, len(responses), batch_size):
        with TrainBatch(score_batch(responses[start : start + batch_size])) as batch:
            parts.append(model.values(batch))
    return torch.cat(parts)


class ReferenceLogProbs:
    """log p_ref(y | x) of every response of a run, computed once by the initial policy and kept in each checkpoint.

    So there is no second model, and a resumed run, on any number of ranks, has the same bits.
    """

    def __init__(self, preferences: Iterable[PreferencePair | LabeledResponse], *, batch_size: int) -> None:
        """Computes nothing yet.

        Args:
            preferences: all whose responses, unrelated ones too, will be asked for.
            batch_size: responses that are sent to the ranks at once.
        """
        self._responses = {_key(response): response for one in preferences for response in sequences_in(one)}
        self._batch_size = batch_size
        self._values: dict[Any, float] = {}

    def compute(self, model: ModelHandle) -> None:
        """Computes all log-probs with `model`, which becomes the reference."""
        rows = sequence_log_probs(model, list(self._responses.values()), batch_size=self._batch_size)
        self._values = dict(zip(self._responses, rows.tolist(), strict=True))

    def of(self, responses: Sequence[Demonstration]) -> Tensor:
        """Their log-probs, float32 [S]."""
        return torch.tensor([self._values[_key(one)] for one in responses], dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """The log-probs in the order of the responses, and a checksum of these."""
        values = np.array([self._values[key] for key in self._responses], dtype="<f4")
        return {"responses": self._checksum(), "log_probs": base64.b64encode(values.tobytes()).decode()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises InputError if the log-probs are those of other responses."""
        if state["responses"] != self._checksum():
            raise InputError(
                "the checkpoint has reference log-probs of other preferences",
                field="supervised.files",
                remedy="resume with the files, model, supervised.max_length and trainer.seed of the run that wrote it",
            )
        values = np.frombuffer(base64.b64decode(state["log_probs"]), dtype="<f4")
        self._values = dict(zip(self._responses, values.tolist(), strict=True))

    def _checksum(self) -> str:
        checksum = 0
        for ids in (ids for key in self._responses for ids in key[:2]):
            checksum = zlib.crc32(np.array([len(ids), *ids], dtype="<i4").tobytes(), checksum)
        return f"{len(self._responses)} {checksum:08x}"


def _key(one: Demonstration) -> tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...] | None]:
    mask = one.response_mask
    return tuple(one.prompt_ids), tuple(one.response_ids), None if mask is None else tuple(mask)
