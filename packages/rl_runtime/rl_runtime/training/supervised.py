"""Supervised fine-tuning with the same engine, packing and train batch as reinforcement learning."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from ds_engine import LossOutput, StepStats, TokenBatch, TokenOutputs
from rl_core import SequenceData, token_weights
from run_kit import StopRequest

from ..config import SupervisedConfig
from ..ranks.model_handle import ModelHandle
from ..ranks.train_batch import TrainBatch


class DemonstrationLike(Protocol):
    """A prompt and the response to learn."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def response_ids(self) -> Sequence[int]: ...
    @property
    def response_mask(self) -> Sequence[bool] | None: ...


def nll_loss(outputs: TokenOutputs, batch: TokenBatch) -> LossOutput:
    """Weighted negative log-likelihood, -sum_k w_k log p_k; with token-mean weights the cross-entropy."""
    loss = -(batch.columns["weights"] * outputs.log_probs_K).sum()
    return LossOutput(loss=loss, metrics={"nll": loss.detach()})


def train_supervised(
    model: ModelHandle,
    demonstrations: Sequence[DemonstrationLike],
    config: SupervisedConfig,
    *,
    seed: int,
    on_step: Callable[[int, StepStats], None],
    stop: StopRequest | None = None,
) -> int:
    """Runs `config.steps` optimizer steps over shuffled epochs of the demonstrations; returns how many it took.

    Args:
        stop: once it has a signal, no further step is taken.
    """
    rng = np.random.default_rng(seed)
    order = np.empty(0, dtype=np.int64)
    for step in range(1, config.steps + 1):
        while len(order) < config.batch_size:
            order = np.concatenate([order, rng.permutation(len(demonstrations))])
        chosen, order = order[: config.batch_size], order[config.batch_size :]
        on_step(step, supervised_step(model, [demonstrations[i] for i in chosen]))
        if stop is not None and stop.signal:
            return step
    return config.steps


def supervised_step(model: ModelHandle, batch: Sequence[DemonstrationLike]) -> StepStats:
    """One optimizer step on the token mean over the response tokens of `batch` that are not masked out."""
    response_lens_N = torch.tensor([sum(item.response_mask or [True] * len(item.response_ids)) for item in batch])
    weights_K = token_weights("token_mean", response_lens_N).repeat_interleave(response_lens_N)
    sequences = [
        SequenceData(prompt_ids=item.prompt_ids, response_ids=item.response_ids, response_mask=item.response_mask)
        for item in batch
    ]
    with TrainBatch(sequences, columns={"weights": weights_K}) as train_batch:
        return model.update(train_batch.mini_batches[0], nll_loss)
