"""Validation of supervised training: the loss on held-out demonstrations, and greedy responses to some of them.

The responses come from the training engine, one forward pass per token and without a key/value cache. A rollout server
would double the memory for a look at a few responses, and `transformers.generate` on one rank cannot gather the shards
of ZeRO-3; this needs neither and works with offload, LoRA, NF4 and sequence parallelism.
"""

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Protocol

from rl_core import SequenceData

from ..ranks.model_handle import ModelHandle
from ..ranks.train_batch import TrainBatch
from .supervised import DemonstrationLike, sequences
from .supervised_config import FineTuningConfig


class Decoder(Protocol):
    """The part of a tokenizer that samples need."""

    @property
    def eos_token_id(self) -> Any: ...
    def decode(self, token_ids: Sequence[int]) -> Any: ...


class HeldOut:
    """The held-out demonstrations of a run."""

    def __init__(
        self, demonstrations: Sequence[DemonstrationLike], tokenizer: Decoder, config: FineTuningConfig
    ) -> None:
        """`demonstrations`: at least one."""
        self._demonstrations, self._tokenizer, self._config = demonstrations, tokenizer, config

    def metrics(self, model: ModelHandle) -> dict[str, float]:
        """Mean negative log-likelihood over all held-out response tokens, and its exponential."""
        total, count, size = 0.0, 0, self._config.batch_size
        for start in range(0, len(self._demonstrations), size):
            with TrainBatch(sequences(self._demonstrations[start : start + size])) as batch:
                columns = model.log_probs(batch).log_probs
            total += sum(float(column.sum(dtype="float64")) for column in columns)
            count += sum(len(column) for column in columns)
        loss = -total / count
        perplexity = math.exp(min(loss, 700.0))  # exp overflows from 710 on
        return {"val/loss": loss, "val/perplexity": perplexity, "val/num_tokens": float(count)}

    def samples(self, model: ModelHandle) -> list[dict[str, Any]]:
        """Greedy responses to the first prompts, see `greedy_samples`."""
        return greedy_samples(model, self._demonstrations, self._tokenizer, self._config)


def greedy_samples(
    model: ModelHandle, demonstrations: Sequence[DemonstrationLike], tokenizer: Decoder, config: FineTuningConfig
) -> list[dict[str, Any]]:
    """Greedy responses to the first prompts, as lines of `rollouts/`; the reward is 1 for the demonstrated one."""
    chosen = demonstrations[: config.num_samples]
    end = int(tokenizer.eos_token_id)
    found = greedy_responses(model, [item.prompt_ids for item in chosen], max_tokens=config.sample_tokens, end=end)
    return [
        {
            "prompt": str(tokenizer.decode(list(item.prompt_ids))),
            "response": str(tokenizer.decode(response)),
            "reward": float(response == _first_turn(item)),
            "demonstrated": str(tokenizer.decode(_first_turn(item))),
        }
        for item, response in zip(chosen, found, strict=True)
    ]


def greedy_responses(
    model: ModelHandle, prompts: Sequence[Sequence[int]], *, max_tokens: int, end: int
) -> list[list[int]]:
    """The most likely token after each prompt, again and again, up to `end` (included) or `max_tokens` tokens."""
    responses: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_tokens):
        growing = [index for index, response in enumerate(responses) if response[-1:] != [end]]
        if not growing:
            break
        # The target is a placeholder: the engine returns the token it finds most likely there.
        rows = [SequenceData(prompt_ids=[*prompts[i], *responses[i]], response_ids=[end]) for i in growing]
        with TrainBatch(rows) as batch:
            tokens = model.next_tokens(batch)
        for index, token in zip(growing, tokens, strict=True):
            responses[index].append(token)
    return responses


def _first_turn(item: DemonstrationLike) -> list[int]:
    """The tokens of the response up to the first one that the model does not write."""
    mask = item.response_mask or [True] * len(item.response_ids)
    return [token for token, _ in takewhile(lambda one: one[1], zip(item.response_ids, mask, strict=True))]
