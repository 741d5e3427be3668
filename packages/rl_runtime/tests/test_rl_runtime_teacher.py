"""A teacher's log-probs belong to the sampled tokens, whatever their age and whatever lies between them."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_runtime.experience import Experience, ExperienceBatch
from rl_runtime.ranks.train_batch import TrainBatch
from rl_runtime.training.teacher import ServerTeacher, teacher_columns
from rollout_vllm import ScoringError, ServerDiedError, TokenScores


@dataclass(frozen=True)
class Prompt:
    id: str
    token_ids: tuple[int, ...]
    text: str = ""
    ground_truth: str = "1"
    data_source: str = "gsm8k"


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
def batches(draw: st.DrawFn) -> ExperienceBatch:
    """Groups of several policy versions; some samples are episodes, with tokens that the policy did not sample."""
    items = []
    for group in range(draw(st.integers(1, 3))):
        prompt = Prompt(str(group), tuple(range(draw(st.integers(1, 4)))))
        for index in range(draw(st.integers(1, 3))):
            masks = st.lists(st.booleans(), min_size=1, max_size=7).filter(any)
            mask = np.asarray(draw(masks))
            sampled = int(mask.sum())
            cut = draw(st.integers(0, sampled))
            spans = tuple((version, num) for version, num in ((3, cut), (4, sampled - cut)) if num)
            items.append(
                Experience(
                    prompt=prompt,
                    group_id=group,
                    sample_index=index,
                    response_ids=tuple(100 * len(items) + t for t in range(len(mask))),
                    response_text="",
                    response_mask=None if mask.all() else mask,
                    rollout_log_probs=None,
                    finish_reason="stop",
                    version_spans=spans,
                    score=0.0,
                )
            )
    return ExperienceBatch(items=tuple(items), policy_version=5)


@given(batch=batches(), top_k=st.integers(0, 3))
def test_each_sampled_token_gets_its_own_log_prob(batch: ExperienceBatch, top_k: int) -> None:
    sampled = [
        token
        for item in batch.items
        for place, token in enumerate(item.response_ids)
        if item.response_mask is None or item.response_mask[place]
    ]
    servers = Servers()
    teacher = teacher_of(Scorer(), servers, top_k)
    mini_batches = batch.mini_batch_indices(1)
    for _ in range(2):
        with TrainBatch.of(batch, mini_batches=mini_batches) as train_batch:
            found = teacher.start(batch)(train_batch)["teacher_log_probs"]
            assert found.tolist() == [-float(token) for token in sampled]
    assert servers.num_waits == 1
    if top_k:
        scores = Scorer().score([(item.prompt.token_ids, item.response_ids) for item in batch.items], top_k=top_k)
        ids_KC = teacher_columns(batch, scores, top_k)["teacher_top_ids"]
        assert torch.equal(ids_KC, torch.tensor(sampled)[:, None].repeat(1, top_k) + 1)


def test_a_dead_teacher_is_the_reason_for_missing_scores() -> None:
    item = Experience(
        prompt=Prompt("0", (1,)),
        group_id=0,
        sample_index=0,
        response_ids=(1,),
        response_text="",
        rollout_log_probs=None,
        finish_reason="stop",
        version_spans=((0, 1),),
        score=0.0,
    )
    batch = ExperienceBatch(items=(item,))
    finish = teacher_of(Scorer(ScoringError("no server is left")), Servers(), 0).start(batch)
    with TrainBatch.of(batch) as train_batch, pytest.raises(ServerDiedError, match="it was killed"):
        finish(train_batch)
