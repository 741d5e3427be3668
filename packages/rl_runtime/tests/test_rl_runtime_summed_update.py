"""Training on groups that have ended while others are generated: it is offered whole groups, and the update is the
whole batch's."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_runtime_samples import sample
from rl_runtime_scripted_client import ScriptedClient, phase

from plinth_testing import RankPool, write_tiny_model
from rl_core import Batch
from rl_data import Prompt
from rl_runtime import PolicyConfig, loss_weights
from rl_runtime.rollout.scoring import Scorer
from rl_runtime.samples import batch_of
from rl_runtime.training.policy_loss import loss_totals
from rollout_vllm import Group, Request, Sample, SamplingConfig
from rollout_vllm.client.transport import LoopThread


@pytest.mark.slow
def test_an_update_summed_over_parts_is_that_of_the_whole_batch(two_ranks: RankPool, tmp_path: Path) -> None:
    """Whichever groups end first: loss, gradient norm, metrics, old log-probs and weights."""
    two_ranks.run("compare_summed_updates", folder=str(write_tiny_model(tmp_path)))


@given(
    lens=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    data=st.data(),
    mode=st.sampled_from(("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "fixed_length")),
    filters=st.booleans(),
)
def test_weights_of_parts_differ_from_those_of_the_whole_by_one_factor(
    lens: list[int], data: st.DataObject, mode: str, filters: bool
) -> None:
    config = PolicyConfig(loss_aggregation=mode, overlong_filter=filters)  # type: ignore[arg-type]
    samples = [
        sample(length, group=number, finish_reason=data.draw(st.sampled_from(("stop", "length"))))
        for number, length in enumerate(lens)
    ]
    cut = data.draw(st.integers(0, len(samples)))
    whole = batch_of(samples)
    parts = [batch_of(part) for part in (samples[:cut], samples[cut:]) if part]

    def weights(batch: Batch, totals: tuple[int, int] | None) -> dict[str, torch.Tensor]:
        return loss_weights(batch, config, max_tokens=9, totals=totals)

    num_tokens, num_samples = (max(1, total) for total in loss_totals(whole, config))
    divisors = {"weights": num_tokens if mode == "token_mean" else num_samples, "mean_weights": num_tokens}
    for name, expected_K in weights(whole, None).items():
        sums_K = torch.cat([weights(part, (1, 1))[name] for part in parts])
        torch.testing.assert_close(sums_K / divisors[name], expected_K, rtol=1e-6, atol=0)


PROMPTS = [Prompt(id=name, text=name, token_ids=(1,), ground_truth="2", data_source="gsm8k") for name in "abcd"]


class Taker:
    """Takes what it is offered from the `least`th group on; remembers the offers."""

    def __init__(self, least: int) -> None:
        self.least, self.offers = least, list[list[str]]()

    def __call__(self, samples: Sequence[Sample]) -> bool:
        names = list(dict.fromkeys(one.prompt.id for one in samples))
        self.offers.append(names)
        return len(names) >= self.least


class Dead(Taker):
    def __call__(self, samples: Sequence[Sample]) -> bool:
        super().__call__(samples)
        raise RuntimeError("a rank died")


@dataclass
class Slow(ScriptedClient):
    """Groups end in the order d, c, b, a, each after the one before it has been offered, if it has two samples."""

    taker: Taker = field(default_factory=lambda: Taker(1))
    given: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        loop = LoopThread("slow")  # it answers while the caller trains
        self.run, self.start = loop.run, loop.start  # type: ignore[method-assign]
        self.close = lambda: (loop.settle(cancel=True), loop.close())

    async def generate(self, requests: list[Request], sampling: SamplingConfig, *, on_group: Any) -> list[Group]:
        groups = [self._group(request, ids) for request, ids in zip(requests, self.responses, strict=True)]
        for group in reversed(groups):
            self.given.append(group.request.prompt.id)
            on_group(group)
            while len(group.samples) > 1 and group is not groups[0] and not self._is_offered(self.given[-1]):
                await asyncio.sleep(0.01)
        return groups

    def _is_offered(self, name: str) -> bool:
        return any(name in offer for offer in self.taker.offers)


def collect(client: Slow, scorer: Scorer) -> tuple[list[str], int]:
    """The groups of the step's batch in order, and the number of samples that are left out."""
    with closing(client):
        collected = phase(client, scorer).collect(PROMPTS, SamplingConfig(n=2), step=1, offer=client.taker)
    return list(dict.fromkeys(one.prompt.id for one in collected.samples)), collected.num_failed


def test_groups_are_offered_as_they_end_and_those_that_are_taken_come_first(scorer: Scorer) -> None:
    client = Slow([[2, 2], [2, 3], [3, 2], [2, 2]], n=2, taker=Taker(2))
    assert collect(client, scorer) == (["d", "c", "a", "b"], 0)
    offers = [names for names, _ in groupby(client.taker.offers)]
    assert offers == [["d"], ["d", "c"], ["b"]], "the last group is left to the update"
    assert collect(Slow(client.responses, n=2, taker=Taker(9)), scorer) == (["a", "b", "c", "d"], 0)


def test_a_group_without_two_samples_is_neither_offered_nor_trained_on(scorer: Scorer) -> None:
    client = Slow([[2, 2], [2], [3, 2], []], n=2)
    assert collect(client, scorer) == (["c", "a"], 4)
    assert client.taker.offers == [["c"]]


def test_an_error_of_the_update_ends_the_generation(scorer: Scorer) -> None:
    client = Slow([[2, 2]] * 4, n=2, taker=Dead(1))
    with pytest.raises(RuntimeError, match="a rank died"):
        collect(client, scorer)
    assert client.given == ["d"]
