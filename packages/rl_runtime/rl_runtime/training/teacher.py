"""A teacher for on-policy distillation: it scores the student's samples on servers, or on the trainer's ranks.

Shapes: K generated tokens of all samples in order; C most likely tokens of the teacher; H and V of the student's head.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rl_core
from ds_engine import LmHead, LossOutput, TokenOutputs
from rl_core import DivergenceKind
from rollout_vllm import ScoringError, ServerGroup, TokenScorer, TokenScores

from ..errors import InputError
from ..experience import ExperienceBatch
from ..ranks.model_handle import ModelHandle
from ..ranks.train_batch import TrainBatch
from ..rollout.watched_servers import WatchedServers
from .off_policy import correction_weights
from .policy import PolicyConfig
from .policy_loss import policy_loss

TEACHER_LOG_PROBS = "teacher_log_probs"
_TOP_IDS, _TOP_LOG_PROBS, _HIDDEN = "teacher_top_ids", "teacher_top_log_probs", "teacher_hidden"

Finish = Callable[[TrainBatch], Mapping[str, Tensor]]
"""Waits for the teacher and adds its columns to the train batch; returns `teacher_log_probs` [K] if it has them."""


class ServerTeacher:
    """A teacher on servers. It scores while the ranks compute."""

    def __init__(
        self,
        servers: ServerGroup,
        scorer: TokenScorer,
        *,
        top_k: int,
        vocab_size: int,
        watched: WatchedServers | None = None,
    ) -> None:
        """
        Args:
            top_k: 0 for the sampled tokens alone.
            vocab_size: rows of the student's head.
            watched: restarts the servers, once they are ready; None: one that dies ends the run.
        """
        self._servers, self._scorer, self._top_k, self._vocab_size = servers, scorer, top_k, vocab_size
        self._watched = watched
        self._is_ready = False

    def start(self, batch: ExperienceBatch) -> Finish:
        """Sends the samples to the servers."""
        if not self._is_ready:
            self._servers.wait_ready()
            self._is_ready = True
            if self._watched is not None:
                self._watched.start()
        sequences = [(item.prompt.token_ids, item.response_ids) for item in batch.items]
        future = self._scorer.start(self._scorer.score(sequences, top_k=self._top_k))
        return lambda train_batch: self._finish(future, batch, train_batch)

    def update_arguments(self) -> dict[str, Any]:
        """Further arguments of `ModelHandle.update`."""
        return {}

    def _finish(
        self, future: Future[list[TokenScores]], batch: ExperienceBatch, train_batch: TrainBatch
    ) -> Mapping[str, Tensor]:
        try:
            scores = future.result()
        except ScoringError:
            check = self._servers.check if self._watched is None else self._watched.check
            check()
            raise
        columns = teacher_columns(batch, scores, self._top_k)
        if self._top_k and (largest := int(columns[_TOP_IDS].max())) >= self._vocab_size:
            raise InputError(
                f"teacher.model proposes token {largest}, which the student's head of {self._vocab_size} rows lacks; "
                "use teacher.signal=sampled"
            )
        train_batch.add_columns(columns)
        return {TEACHER_LOG_PROBS: columns[TEACHER_LOG_PROBS]}


class RankTeacher:
    """A frozen teacher on the trainer's ranks."""

    def __init__(self, model: ModelHandle, *, full: bool) -> None:
        """`full`: for the whole vocabulary; False: for the sampled tokens alone."""
        self._model, self._full = model, full

    def start(self, batch: ExperienceBatch) -> Finish:
        """Computes nothing yet: the ranks are busy."""
        del batch
        return self._finish

    def update_arguments(self) -> dict[str, Any]:
        """Further arguments of `ModelHandle.update`."""
        return {"teacher": self._model} if self._full else {}

    def _finish(self, train_batch: TrainBatch) -> Mapping[str, Tensor]:
        if self._full:
            self._model.keep_hidden_states(train_batch, column=_HIDDEN)
            return {}
        rows = self._model.log_probs(train_batch, column=TEACHER_LOG_PROBS).log_probs
        return {TEACHER_LOG_PROBS: torch.from_numpy(np.concatenate(rows))}


def teacher_columns(batch: ExperienceBatch, scores: list[TokenScores], top_k: int) -> dict[str, Tensor]:
    """The columns of generated tokens: `teacher_log_probs` [K], and ids and log-probs [K, C] of a top-k."""
    masks = [slice(None) if item.response_mask is None else item.response_mask for item in batch.items]

    def joined(name: str) -> Tensor:
        return torch.from_numpy(
            np.concatenate([getattr(score, name)[mask] for score, mask in zip(scores, masks, strict=True)])
        )

    columns = {TEACHER_LOG_PROBS: joined("log_probs")}
    return columns | ({_TOP_IDS: joined("top_ids"), _TOP_LOG_PROBS: joined("top_log_probs")} if top_k else {})


def teacher_term(
    hidden_KH: Tensor,
    weight_VH: Tensor,
    columns: Mapping[str, Tensor],
    temperature: float,
    *,
    kind: DivergenceKind,
    beta: float,
    teacher_head: LmHead | None = None,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """The divergence to the teacher at each token, [K]; a `ds_engine.HeadTerm`.

    Over the whole vocabulary with `teacher_head`, else over the top-k in the columns.
    """
    teacher: rl_core.TeacherHead | rl_core.TeacherTopK
    if teacher_head is not None:
        teacher = rl_core.TeacherHead(
            hidden_KG=columns[_HIDDEN],
            weight_VG=teacher_head.weight_VH,
            bias_V=teacher_head.bias_V,
            soft_cap=teacher_head.soft_cap,
        )
    else:
        teacher = rl_core.TeacherTopK(ids_KC=columns[_TOP_IDS], log_probs_KC=columns[_TOP_LOG_PROBS])
    return rl_core.linear_divergence(
        hidden_KH, weight_VH, teacher, temperature, kind=kind, beta=beta, bias=bias, soft_cap=soft_cap
    )


def distillation_loss(
    outputs: TokenOutputs, batch: rl_core.PackedBatch, *, config: PolicyConfig, weight: float
) -> LossOutput:
    """The micro batch's share of the policy loss plus `weight` times the divergence to the teacher, if there is a term.

    Columns: those of `policy_loss`.
    """
    result = policy_loss(outputs, batch, config=config, kl_coef=0.0)
    if outputs.term_K is None:
        return result
    weights_K = batch.columns["weights"] * correction_weights(batch, config.rollout_correction)
    divergence = (batch.columns["mean_weights"] * outputs.term_K).sum().detach()
    loss = result.loss + weight * (weights_K * outputs.term_K).sum()
    return LossOutput(loss=loss, metrics={**result.metrics, "teacher_divergence": divergence})
