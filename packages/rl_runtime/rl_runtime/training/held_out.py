"""Validation of supervised training: the loss on held-out demonstrations, and greedy responses to some of them.

The responses come from the training engine, one forward pass per token and without a key/value cache. A rollout server
would double the memory for a look at a few responses, and `transformers.generate` on one rank cannot gather the shards
of ZeRO-3; this needs neither and works with offload, LoRA, NF4 and sequence parallelism.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from rl_core import pack
from rl_data import Demonstration

from ..ranks.model_handle import ModelHandle
from ..ranks.train_batch import TrainBatch
from .supervised import packed
from .supervised_config import FineTuningConfig


class HeldOut:
    """The held-out examples of a run, and how they are measured.

    Args:
        demonstrations: greedy responses to the first prompts of these are written down.
        measure: metrics by name without `val/`, `loss` among them; None: the loss on the demonstrations, at least one.
    """

    def __init__(
        self,
        demonstrations: Sequence[Demonstration],
        tokenizer: Any,
        config: FineTuningConfig,
        measure: Callable[[ModelHandle], Mapping[str, float]] | None = None,
    ) -> None:
        self._demonstrations, self._tokenizer, self._config = demonstrations, tokenizer, config
        self._measure = measure or self._loss

    def metrics(self, model: ModelHandle) -> dict[str, float]:
        """The measured metrics, each with the prefix `val/`."""
        return {f"val/{name}": value for name, value in self._measure(model).items()}

    def _loss(self, model: ModelHandle) -> dict[str, float]:
        """The mean negative log-likelihood over all held-out response tokens, and its exponential."""
        rows = list(log_probs_of(model, self._demonstrations, batch_size=self._config.batch_size))
        count = sum(map(len, rows))
        loss = -sum(float(row.sum(dtype=torch.float64)) for row in rows) / count
        perplexity = math.exp(min(loss, 700.0))  # exp overflows from 710 on
        return {"loss": loss, "perplexity": perplexity, "num_tokens": float(count)}

    def samples(self, model: ModelHandle) -> list[dict[str, Any]]:
        """Greedy responses to the first prompts, as lines of `rollouts/`; the reward is 1 for the demonstrated one."""
        chosen, decode = self._demonstrations[: self._config.num_samples], self._tokenizer.decode
        if not chosen:
            return []
        prompts, end = [item.prompt_ids for item in chosen], int(self._tokenizer.eos_token_id)
        images = [None if model.images is None else model.images(item.images) for item in chosen]
        responses = greedy_responses(model, prompts, max_tokens=self._config.sample_tokens, end=end, images=images)
        return [
            {
                "prompt": str(decode(list(item.prompt_ids))),
                "response": str(decode(response)),
                "reward": float(response == _first_turn(item)),
                "demonstrated": str(decode(_first_turn(item))),
            }
            for item, response in zip(chosen, responses, strict=True)
        ]


def log_probs_of(model: ModelHandle, demonstrations: Sequence[Demonstration], *, batch_size: int) -> Iterator[Tensor]:
    """The log-probs of each response's tokens, without gradients; the ranks get `batch_size` of them at once."""
    for start in range(0, len(demonstrations), batch_size):
        batch = packed(demonstrations[start : start + batch_size], images=model.images)
        with TrainBatch(batch) as train_batch:
            log_probs_K = model.log_probs(train_batch)
        yield from batch.split(log_probs_K)


def greedy_responses(
    model: ModelHandle,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    end: int,
    images: Sequence[str | None] = (),
) -> list[list[int]]:
    """The most likely token after each prompt, again and again, up to `end` (included) or `max_tokens` tokens."""
    responses: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_tokens):
        growing = [index for index, response in enumerate(responses) if response[-1:] != [end]]
        if not growing:
            break
        # The target is a placeholder: the engine returns the token it finds most likely there.
        rows, files = [[*prompts[i], *responses[i]] for i in growing], [images[i] for i in growing if images]
        with TrainBatch(pack(rows, [[end]] * len(rows), images=files)) as batch:
            tokens = model.next_tokens(batch)
        for index, token in zip(growing, tokens, strict=True):
            responses[index].append(token)
    return responses


def _first_turn(item: Demonstration) -> list[int]:
    """The tokens of the response up to the first one that the model does not write."""
    mask = item.response_mask or [True] * len(item.response_ids)
    return [token for token, _ in takewhile(lambda one: one[1], zip(item.response_ids, mask, strict=True))]
