"""Supervised fine-tuning with the same engine, packing and train batch as reinforcement learning."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ds_engine import LossOutput, StepStats, TokenBatch, TokenOutputs
from rl_core import Batch, pack, token_weights
from rl_data import Demonstration, ImageFiles, LabeledResponse, PreferencePair

from ..ranks.model_handle import ModelHandle
from ..ranks.train_batch import TrainBatch
from .supervised_config import SupervisedConfig


def nll_loss(outputs: TokenOutputs, batch: TokenBatch) -> LossOutput:
    """Weighted negative log-likelihood, -sum_k w_k log p_k; with token-mean weights the cross-entropy."""
    loss = -(batch.columns["weights"] * outputs.log_probs_K).sum()
    return LossOutput(loss=loss, metrics={"nll": loss.detach()})


def train_supervised(
    model: ModelHandle,
    demonstrations: Sequence[Demonstration],
    config: SupervisedConfig,
    *,
    seed: int,
) -> Iterator[tuple[int, StepStats]]:
    """Takes `config.steps` optimizer steps over shuffled epochs of the demonstrations, one for each that is drawn from
    the iterator: a warm start."""
    # Not PromptSampler's order: published results of the demos begin with this warm start.
    rng = np.random.default_rng(seed)
    order = np.empty(0, dtype=np.int64)
    for step in range(1, config.steps + 1):
        while len(order) < config.batch_size:
            order = np.concatenate([order, rng.permutation(len(demonstrations))])
        chosen, order = order[: config.batch_size], order[config.batch_size :]
        yield step, supervised_step(model, [demonstrations[i] for i in chosen])


def supervised_step(model: ModelHandle, batch: Sequence[Demonstration]) -> StepStats:
    """One optimizer step on the token mean over the response tokens of `batch` that are not masked out.

    The mean is over the whole batch, whatever its split into micro batches and ranks.
    """
    lens_N = response_lens(batch)
    weights_K = token_weights("token_mean", lens_N).repeat_interleave(lens_N)
    with TrainBatch(packed(batch, columns={"weights": weights_K}, images=model.images)) as train_batch:
        stats = model.update(train_batch.mini_batches[0], nll_loss)
    return replace(stats, metrics={**stats.metrics, "num_targets": float(lens_N.sum())})


def response_lens(batch: Sequence[Demonstration]) -> torch.Tensor:
    """int64 [N], the tokens of each response that are trained on."""
    return torch.tensor([sum(item.response_mask or [True] * len(item.response_ids)) for item in batch])


def sequences_in(example: Demonstration | PreferencePair | LabeledResponse) -> tuple[Demonstration, ...]:
    """The tokenized sequences of an example: itself, or both of its responses."""
    if isinstance(example, PreferencePair):
        return example.chosen, example.rejected
    return (example.response, example.unrelated) if isinstance(example, LabeledResponse) else (example,)


def packed(
    batch: Sequence[Demonstration],
    *,
    columns: Mapping[str, torch.Tensor] | None = None,
    per_sequence: Mapping[str, torch.Tensor] | None = None,
    images: ImageFiles | None = None,
) -> Batch:
    """The demonstrations as a batch whose targets are the response tokens that are not masked out.

    Args:
        images: the files of demonstrations with images.
    """
    return pack(
        [item.prompt_ids for item in batch],
        [item.response_ids for item in batch],
        masks=[item.response_mask for item in batch],
        columns=columns,
        per_sequence=per_sequence,
        images=[None if images is None else images(item.images) for item in batch],
    )
