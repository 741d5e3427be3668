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
from rl_core import Batch, DivergenceKind
from rollout_vllm import ScoringError, ServerGroup, TokenScorer, TokenScores

from ..errors import InputError
from ..ranks.model_handle import ModelHandle
from ..ranks.train_batch import TrainBatch
from ..rollout.watched_servers import WatchedServers
from .off_policy import correction_weights
from .policy import PolicyConfig
from .policy_loss import policy_loss

TEACHER_LOG_PROBS = "teacher_log_probs"
_TOP_IDS, _TOP_LOG_PROBS, _HIDDEN = "teacher_top_ids", "teacher_top_log_probs", "teacher_hidden"

Finish = Callable[[TrainBatch], None]
"""Waits for the teacher and adds its columns to the batch: `teacher_log_probs`, except where its whole distributions
stay on the ranks."""


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

    def start(self, batch: Batch) -> Finish:
        """Sends the samples to the servers."""
        if not self._is_ready:
            self._servers.wait_ready()
            self._is_ready = True
            if self._watched is not None:
                self._watched.start()
        future = self._scorer.start(self._scorer.score(sequences_of(batch), top_k=self._top_k))
        return lambda train_batch: self._finish(future, train_batch.batch)

    def update_arguments(self) -> dict[str, Any]:
        """Further arguments of `ModelHandle.update`."""
        return {}

    def _finish(self, future: Future[list[TokenScores]], batch: Batch) -> None:
        try:
            scores = future.result()
        except ScoringError:
            check = self._servers.check if self._watched is None else self._watched.check
            check()
            raise
        columns = teacher_columns(batch, scores, self._top_k)
        if self._top_k and (largest := int(columns[_TOP_IDS].max())) >= self._vocab_size:
            raise InputError(
                f"the teacher proposes token {largest}, which the student's head of {self._vocab_size} rows lacks",
                field="teacher.model",
                remedy="use teacher.signal=sampled",
            )
        batch.add_columns(**columns)


class RankTeacher:
    """A frozen teacher on the trainer's ranks."""

    def __init__(self, model: ModelHandle, *, full: bool) -> None:
        """`full`: for the whole vocabulary; False: for the sampled tokens alone."""
        self._model, self._full = model, full

    def start(self, batch: Batch) -> Finish:
        """Computes nothing yet: the ranks are busy."""
        del batch
        return self._finish

    def update_arguments(self) -> dict[str, Any]:
        """Further arguments of `ModelHandle.update`."""
        return {"teacher": self._model} if self._full else {}

    def _finish(self, train_batch: TrainBatch) -> None:
        if self._full:
            self._model.keep_hidden_states(train_batch, column=_HIDDEN)
        else:
            train_batch.batch.add_columns(**{TEACHER_LOG_PROBS: self._model.log_probs(train_batch)})


def sequences_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """(the tokens before the first target, the others) of each sequence, as a `TokenScorer` gets them."""
    borders, ids = batch.cu_seqlens_S1.tolist(), batch.input_ids_T.tolist()
    firsts = [int(part[0]) + 1 if len(part) else None for part in batch.split(batch.target_index_K)]
    return [
        (ids[start:end], []) if first is None else (ids[start:first], ids[first:end])
        for start, end, first in zip(borders, borders[1:], firsts, strict=False)
    ]


def teacher_columns(batch: Batch, scores: list[TokenScores], top_k: int) -> dict[str, Tensor]:
    """The columns of targets: `teacher_log_probs` [K], and ids and log-probs [K, C] of a top-k.

    Args:
        scores: those of `sequences_of(batch)`.
    """
    targets = batch.split(batch.target_index_K)
    places = [(index_K - index_K[:1]).numpy() for index_K in targets]

    def joined(name: str) -> Tensor:
        rows = [getattr(score, name)[place] for score, place in zip(scores, places, strict=True)]
        return torch.from_numpy(np.concatenate(rows))

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


def distillation_loss(outputs: TokenOutputs, batch: Batch, *, config: PolicyConfig, weight: float) -> LossOutput:
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
