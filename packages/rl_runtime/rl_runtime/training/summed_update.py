"""An update that begins before its batch is complete: its gradient is summed over parts of the batch.

The loss of a step with one mini batch is  L = (1/n) sum over tokens  (or 1/M over samples), and so is its gradient. The
sums of groups that have ended are computed while the servers generate the others; n is known with the last one, and
divides the gradient before clipping. So the update is that of the whole batch, but for rounding.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rl_core import Batch
from rollout_vllm import Sample

from ..ranks.model_handle import ModelHandle
from ..ranks.old_log_probs import COLUMN
from ..ranks.train_batch import TrainBatch
from ..samples import Phase, batch_of
from .advantages import advantages
from .metrics import update_metrics
from .off_policy import compare_with_rollout
from .policy import PolicyConfig
from .policy_loss import loss_totals, loss_weights, policy_loss


class SummedUpdate:
    """The update of each step as a sum over parts of its batch (`algorithm.overlap_rollout`).

    The log-probs of each part's own forward pass are its old log-probs: weights change after the last part. Advantages
    compare samples of the same group only.
    """

    def __init__(self, actor: ModelHandle, config: PolicyConfig, *, max_tokens: int) -> None:
        """`max_tokens`: `sampling.max_tokens`."""
        self._actor, self._config, self._max_tokens = actor, config, max_tokens
        self._begin()

    def _begin(self) -> None:
        self._old_log_probs: list[Tensor] = []
        self._num_sequences, self._num_tokens, self._seconds = 0, 0, 0.0
        self._loss, self._metrics = 0.0, dict[str, float]()

    def offer(self, samples: Sequence[Sample]) -> bool:
        """Adds the gradient of the samples of whole groups if they fill a micro batch on every rank.

        Returns:
            False: they have to be offered again, with those of further groups or to `learn`.
        """
        prompts = {sample.prompt_id: sample.prompt_ids.size for sample in samples}  # a group has its prompt once
        num_tokens = sum(prompts.values()) + sum(path.response_ids.size for one in samples for path in one.paths)
        if not self._actor.fills_micro_batches(num_tokens, len(samples)):
            return False
        started = time.perf_counter()
        self._add(batch_of(samples))
        self._seconds += time.perf_counter() - started
        return True

    def learn(self, step: int, batch: Batch, phase: Phase) -> dict[str, float]:
        """Adds the rest of the step's batch and takes the optimizer's step; returns the metrics of the update.

        Args:
            batch: of all samples of the step, those first that `offer` took, in their order.
        """
        early = {
            "actor/early_share": self._num_tokens / max(1, batch.num_tokens),
            "actor/early_s": self._seconds,
        }
        with phase("update_actor"):
            if self._num_sequences < batch.num_sequences:
                self._add(batch.select(range(self._num_sequences, batch.num_sequences)))
            num_tokens, num_samples = (max(1, total) for total in loss_totals(batch, self._config))
            divisor = num_tokens if self._config.loss_aggregation == "token_mean" else num_samples
            stats = self._actor.step(gradient_scale=1.0 / divisor)
        counts = {name: value for name, value in self._metrics.items() if name.endswith("tokens_per_update")}
        means = {name: value / num_tokens for name, value in self._metrics.items() if name not in counts}
        means["pg_loss"] = self._metrics["pg_loss"] / divisor
        stats = replace(stats, loss=self._loss / divisor, metrics=means | counts)
        batch.add_columns(**{COLUMN: torch.cat(self._old_log_probs)})
        self._begin()
        self._actor.skipped.count(stats)
        _, metrics = advantages(batch, self._config, max_tokens=self._max_tokens)
        metrics |= compare_with_rollout(batch, self._config.rollout_correction)
        return metrics | update_metrics("actor", [stats]) | early

    def _add(self, batch: Batch) -> None:
        """Adds the gradient of a part of the batch, which is not divided yet."""
        batch.add_columns(**loss_weights(batch, self._config, max_tokens=self._max_tokens, totals=(1, 1)))
        batch.add_columns(**advantages(batch, self._config, max_tokens=self._max_tokens)[0])
        loss_fn = partial(policy_loss, config=self._config, kl_coef=0.0)
        with TrainBatch(batch) as train_batch:
            loss, metrics, old_K = self._actor.accumulate(train_batch, loss_fn, column=COLUMN)
        self._loss += loss
        self._metrics = {name: self._metrics.get(name, 0.0) + value for name, value in metrics.items()}
        self._old_log_probs.append(old_K)
        self._num_sequences += batch.num_sequences
        self._num_tokens += batch.num_tokens
