"""A teacher's log-probs belong to the sampled tokens, whatever their age and whatever lies between them."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_runtime_samples import prompt, sample

from rl_core import Batch
from rl_runtime.ranks.train_batch import TrainBatch
from rl_runtime.samples import batch_of
from rl_runtime.training.teacher import ServerTeacher
from rollout_vllm import Sample, ScoringError, ServerDiedError, TokenScores


class Servers:
    """Servers that are ready; `check` finds one dead."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait_ready(self) -> None:
        self.num_waits += 1

    def check(self) -> None:
        raise ServerDiedError("it was killed", 0, None)


class Scorer:
    """Answers with log-probs that name their token; the most likely token of each place is its successor."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], *, top_k: int) -> list[TokenScores]:
        assert all(len(prompt) > 0 for prompt, _ in sequences)
        ids = [np.asarray(response, np.int64) for _, response in sequences]
        return [
            TokenScores(
                log_probs=-row.astype(np.float32),
                top_ids=np.repeat(row[:, None] + 1, top_k, 1),
                top_log_probs=np.repeat(-row.astype(np.float32)[:, None] / 2, top_k, 1),
            )
            for row in ids
        ]

    def start(self, scores: list[TokenScores]) -> "Future[list[TokenScores]]":
        future: Future[list[TokenScores]] = Future()
        if self._error is None:
            future.set_result(scores)
        else:
            future.set_exception(self._error)
        return future


def teacher_of(scorer: Scorer, servers: Servers, top_k: int) -> ServerTeacher:
    vocab: Any = {"top_k": top_k, "vocab_size": 10_000}
    return ServerTeacher(servers, scorer, **vocab)  # type: ignore[arg-type]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, list[int]]:
    """Groups of several policy versions, with the tokens that the policy sampled; some samples are episodes."""
    items: list[Sample] = []
    for group in range(draw(st.integers(1, 3))):
        own_prompt = prompt(range(draw(st.integers(1, 4))), str(group))
        for _ in range(draw(st.integers(1, 3))):
            mask = np.asarray(draw(st.lists(st.booleans(), min_size=1, max_size=7).filter(any)))
            cut = draw(st.integers(0, len(mask)))
            spans = tuple((version, num) for version, num in ((3, cut), (4, len(mask) - cut)) if num)
            ids = [100 * len(items) + t for t in range(len(mask))]
            fields = {"prompt": own_prompt, "group": group, "spans": spans, "log_probs": None}
            items.append(sample(ids, response_mask=None if mask.all() else mask, **fields))
    tokens = [
        token
        for item in items
        for place, token in enumerate(item.response_ids.tolist())
        if item.response_mask is None or item.response_mask[place]
    ]
    return batch_of(items, policy_version=5), tokens


@given(drawn=batches(), top_k=st.integers(0, 3))
def test_each_sampled_token_gets_its_own_log_prob(drawn: tuple[Batch, list[int]], top_k: int) -> None:
    batch, tokens = drawn
    servers = Servers()
    teacher = teacher_of(Scorer(), servers, top_k)
    for fresh in (batch, replace(batch, columns={})):
        with TrainBatch(fresh) as train_batch:
            teacher.start(fresh)(train_batch)
        assert fresh.columns["teacher_log_probs"].tolist() == [-float(token) for token in tokens]
        if top_k:
            expected = torch.tensor(tokens)[:, None].repeat(1, top_k) + 1
            assert torch.equal(fresh.columns["teacher_top_ids"], expected)
    assert servers.num_waits == 1


def test_a_dead_teacher_is_the_reason_for_missing_scores() -> None:
    batch = batch_of([sample(1, log_probs=None)])
    finish = teacher_of(Scorer(ScoringError("no server is left")), Servers(), 0).start(batch)
    with TrainBatch(batch) as train_batch, pytest.raises(ServerDiedError, match="it was killed"):
        finish(train_batch)
