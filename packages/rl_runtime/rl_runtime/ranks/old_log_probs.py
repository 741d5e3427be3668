"""The log-probs of a train batch under the weights before its first update, computed no sooner than necessary."""

import math

import torch

from ds_engine import LossFn, StepStats

from .model_handle import ModelHandle
from .train_batch import MiniBatch, TrainBatch

COLUMN = "old_log_probs"


class OldLogProbs:
    """The column `old_log_probs` of a train batch, which the first update may complete.

    The forward pass of the first update computes the log-probs of its mini batch before it changes the weights. With
    `defer_first` that mini batch is left to it, so a step with one mini batch has no pass for old log-probs at all.
    The batch has the column once it is complete.
    """

    def __init__(self, model: ModelHandle, batch: TrainBatch, *, defer_first: bool = False) -> None:
        """Computes nothing yet; call `compute`."""
        self._model, self._batch, self._is_complete = model, batch, not defer_first
        self._values_K = torch.full((batch.batch.num_targets,), math.nan)

    def compute(self) -> None:
        """Computes the log-probs of the mini batches that are not deferred."""
        if mini_batches := range(int(not self._is_complete), len(self._batch.mini_batches)):
            self._values_K = self._model.log_probs(self._batch, mini_batches=mini_batches)
        if self._is_complete:
            self._batch.batch.add_columns(**{COLUMN: self._values_K})

    def update(self, mini_batch: MiniBatch, loss_fn: LossFn) -> StepStats:
        """One optimizer step of the model; the first one completes the column.

        Raises:
            ValueError: the first mini batch is deferred, and another one is updated before it: later its log-probs are
                those of changed weights.
        """
        if self._is_complete:
            return self._model.update(mini_batch, loss_fn)
        if mini_batch.index != 0:
            raise ValueError(f"mini batch {mini_batch.index} is updated before 0, which lacks {COLUMN!r}")
        stats, own_K = self._model.update_with_own_log_probs(mini_batch, loss_fn, column=COLUMN)
        self._batch.batch.add_columns(**{COLUMN: own_K.where(self._values_K.isnan(), self._values_K)})
        self._is_complete = True
        return stats
