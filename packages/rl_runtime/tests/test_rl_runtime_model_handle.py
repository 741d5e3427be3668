"""What a role hands to the ranks of dp x sp and how it reads their answers, with ranks that live in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from ds_engine import EngineConfig, TokenOutputs
from rl_core import BatchConfig, BatchError
from rl_runtime.app.job import job_layout
from rl_runtime.app.job_config import JobConfig
from rl_runtime.config import TrainerConfig
from rl_runtime.errors import InputError
from rl_runtime.experience import Experience, ExperienceBatch
from rl_runtime.ranks.model_handle import ModelHandle, run_concurrently


class EchoRanks:
    """Answers with the target ids as log-probs, and keeps what every rank was given."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.given: list[Any] = []

    def run(self, method: Any, *args: Any) -> list[Any]:
        return [None] * self.world_size

    def run_each(self, method: Any, given: list[Any], *args: Any) -> list[Any]:
        self.given = given
        return [
            [TokenOutputs(log_probs_K=b.target_ids_K.float(), entropy_K=-b.target_ids_K.float()) for b in micro_batches]
            for micro_batches in given
        ]


class Prompt:
    id, text, token_ids, ground_truth, data_source = "p", "p", (1, 2), "1", "gsm8k"


def make_batch(lengths: list[int]) -> ExperienceBatch:
    items = [
        Experience(
            prompt=Prompt(),
            group_id=number,
            sample_index=0,
            response_ids=tuple(100 * number + t for t in range(length)),
            response_text="",
            rollout_log_probs=np.zeros(length, np.float32),
            finish_reason="stop",
            version_spans=((0, length),),
            score=0.0,
        )
        for number, length in enumerate(lengths)
    ]
    return ExperienceBatch(items=tuple(items))


@pytest.mark.parametrize(("world_size", "sp"), [(4, 1), (4, 2), (4, 4), (2, 2)])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_a_replica_gets_the_same_and_answers_once(world_size: int, sp: int, micro_batch_size: int | None) -> None:
    ranks = EchoRanks(world_size)
    role = ModelHandle(ranks, "actor", BatchConfig(token_budget=16, micro_batch_size=micro_batch_size))  # type: ignore[arg-type]
    role.build("model", EngineConfig(sequence_parallel=sp), total_steps=1)
    batch = make_batch([3, 9, 1, 5, 7, 2, 8, 4])
    columns = role.log_probs(batch)
    for item, log_probs, entropy in zip(batch.items, columns.log_probs, columns.entropy, strict=True):
        assert tuple(log_probs) == item.response_ids
        assert tuple(-entropy) == item.response_ids
    for rank in range(world_size):
        assert ranks.given[rank] is ranks.given[rank // sp * sp]
    tokens = [len(micro.input_ids_T) for micros in ranks.given[::sp] for micro in micros]
    assert sum(tokens) == batch.num_tokens
    sizes = [len(micro.cu_seqlens_S1) - 1 for micros in ranks.given for micro in micros]
    assert max(sizes) <= 2 * sp if micro_batch_size else max(tokens) <= 16 * sp


def test_the_batch_has_to_divide_by_dp_and_sp() -> None:
    def config(num_ranks: int, sp: int, mini: int) -> JobConfig:
        return JobConfig(
            trainer=TrainerConfig(num_ranks=num_ranks),
            actor=EngineConfig(sequence_parallel=sp),
            batch=BatchConfig(train_batch_size=mini, mini_batch_size=mini),
        )

    layout = job_layout(config(4, 2, 8))
    assert (layout.dp, layout.sp, layout.tokens_per_forward) == (2, 2, 2 * 16384)
    with pytest.raises(InputError, match=r"actor.sequence_parallel is 3.*trainer.num_ranks \(4\); allowed: 1, 2, 4"):
        job_layout(config(4, 3, 8))
    with pytest.raises(InputError, match=r"critic.sequence_parallel is 8"):
        job_layout(config(4, 1, 8), section="critic", engine=EngineConfig(sequence_parallel=8))
    with pytest.raises(BatchError, match="dp=8 x sp=8"):
        job_layout(config(64, 8, 4))


def test_roles_on_ranks_of_their_own_compute_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=30)
    actor, critic = (ModelHandle(object(), name, BatchConfig()) for name in ("actor", "critic"))  # type: ignore[arg-type]
    phases: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        yield

    assert run_concurrently(phase, ("a", actor, meeting.wait), ("b", critic, lambda: meeting.wait() + 10)) in (
        [0, 11],
        [1, 10],
    )
    assert phases == ["a", "b"]


def test_roles_on_the_same_ranks_take_turns() -> None:
    ranks = object()
    actor, critic = (ModelHandle(ranks, name, BatchConfig()) for name in ("actor", "critic"))  # type: ignore[arg-type]
    order: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        order.append(f"{name} begins")
        yield
        order.append(f"{name} ends")

    run_concurrently(phase, ("a", actor, lambda: order.append("a")), ("b", critic, lambda: order.append("b")))
    assert order == ["a begins", "a", "a ends", "b begins", "b", "b ends"]


def test_a_failure_on_one_roles_ranks_is_raised_when_the_others_are_done() -> None:
    actor, critic = (ModelHandle(object(), name, BatchConfig()) for name in ("actor", "critic"))  # type: ignore[arg-type]
    finished: list[str] = []

    def fail() -> None:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        run_concurrently(lambda _: nullcontext(), ("a", actor, fail), ("b", critic, lambda: finished.append("b")))
    assert finished == ["b"]
