"""Tests the batch math of compact_grpo.py, a trainer that knows nothing of Plinth, with plinth_testing.

    pytest packages/plinth_testing/examples

Each property holds for every correct GRPO trainer: replace the import and the calls to test yours.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import compact_grpo as trainer  # beside this file
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from plinth_testing import launch_ranks, record_calls
from plinth_testing.batches import PaddedBatch, pad
from plinth_testing.strategies import ScoredGroups, TokenSequence, batches, groups, packings, seeds

VOCABULARY = 7
PROPERTY = settings(max_examples=12, deadline=None)
some_batches = batches(vocab_size=VOCABULARY)


class TinyPolicy(nn.Module):
    """Token t + 1 depends on the mean embedding of tokens 0 … t; float64, so that equal means equal."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, 5, dtype=torch.float64)
        self.head = nn.Linear(5, VOCABULARY, dtype=torch.float64)

    def forward(self, ids_BL: Tensor) -> Tensor:
        counts_L1 = torch.arange(1, ids_BL.shape[1] + 1)[:, None]
        return self.head(torch.tanh(self.embed(ids_BL).cumsum(dim=1) / counts_L1))


def one_by_one(policy: nn.Module, sequence: TokenSequence) -> Tensor:
    """Log-probs of the response tokens, each from its own unpadded forward pass."""
    start, ids = len(sequence.prompt_ids), torch.tensor(sequence.ids)
    values = [policy(ids[None, :i])[0, -1].log_softmax(-1)[ids[i]] for i in range(start, len(ids))]
    return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)


def mask_of(batch: PaddedBatch) -> Tensor:
    return trainer.response_mask(batch.prompt_lens_B, batch.total_lens_B, batch.input_ids_BL.shape[1])


def gradient(batch: PaddedBatch, advantages: list[float], micro_batches: list[list[int]]) -> Tensor:
    policy = TinyPolicy()
    advantages_B = torch.tensor(advantages, dtype=torch.float64)
    trainer.accumulate_gradients(policy, batch.input_ids_BL, mask_of(batch), advantages_B, micro_batches)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None])


def some_advantages(count: int) -> list[float]:
    return [(-1) ** i * (1 + i / 2) for i in range(count)]


def expected_gradient(sequences: list[TokenSequence]) -> Tensor:
    """Policy gradient of the first update: the mean over tokens of -advantage * log-prob, sequence by sequence."""
    policy = TinyPolicy()
    log_probs = [one_by_one(policy, sequence) for sequence in sequences]
    weighted = [-a * values.sum() for a, values in zip(some_advantages(len(sequences)), log_probs, strict=True)]
    no_tokens = 0.0 * policy.head.bias.sum()  # gradients are zero, not missing, without response tokens
    loss = no_tokens + torch.stack(weighted).sum() / max(1, sum(len(values) for values in log_probs))
    grads = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


@PROPERTY
@given(some_batches)
def test_masked_log_probs_are_those_of_each_response_token_alone(sequences: list[TokenSequence]) -> None:
    policy, batch = TinyPolicy(), pad(sequences, pad_id=3)
    actual = trainer.token_log_probs(policy, batch.input_ids_BL)
    expected = torch.cat([one_by_one(policy, sequence) for sequence in sequences])
    torch.testing.assert_close(actual[mask_of(batch)], expected)


@PROPERTY
@given(some_batches, st.integers(0, VOCABULARY - 1), st.integers(1, 3))
def test_padding_changes_nothing(sequences: list[TokenSequence], pad_id: int, num_extra: int) -> None:
    rows, advantages = [list(range(len(sequences)))], some_advantages(len(sequences))
    plain, padded = (pad(sequences, pad_id=i, num_extra=n) for i, n in ((0, 0), (pad_id, num_extra)))
    torch.testing.assert_close(gradient(padded, advantages, rows), gradient(plain, advantages, rows))


@PROPERTY
@given(some_batches, st.data())
def test_any_split_into_micro_batches_gives_the_gradient_of_plain_loops(
    sequences: list[TokenSequence], data: st.DataObject
) -> None:
    splits = data.draw(packings([len(sequence.ids) for sequence in sequences], token_budget=12))
    actual = gradient(pad(sequences), some_advantages(len(sequences)), splits)
    torch.testing.assert_close(actual, expected_gradient(sequences))


@PROPERTY
@given(groups(group_size=4))
def test_advantages_of_a_group_do_not_depend_on_other_groups(drawn: ScoredGroups) -> None:
    scores = torch.tensor(drawn.scores, dtype=torch.float64)
    actual = trainer.group_advantages(scores, 4)
    for start in range(0, len(scores), 4):
        group, own = scores[start : start + 4], actual[start : start + 4]
        torch.testing.assert_close(own, trainer.group_advantages(group, 4))
        torch.testing.assert_close(own, (group - group.mean()) / (group.std() + 1e-4))


@PROPERTY
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-2, 2))
def test_the_loss_is_the_smaller_of_both_objectives(log_prob: float, old_log_prob: float, advantage: float) -> None:
    ratio = math.exp(log_prob - old_log_prob)
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    log_probs, old, advantages = (torch.tensor(value) for value in ([[log_prob]], [[old_log_prob]], [advantage]))
    assert trainer.policy_loss(log_probs, old, advantages).item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@PROPERTY
@given(seeds())
def test_the_expected_penalty_is_the_divergence_from_the_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy, reference = torch.randn(2, VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(-1)
    expected = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * trainer.kl_penalty(policy, reference)).sum(), expected)


@contextmanager
def lone_rank() -> Iterator[None]:
    """A process group of one rank: collectives run and are recorded, and no rank has to wait for another."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@PROPERTY
@given(some_batches)
def test_collectives_do_not_depend_on_the_data(sequences: list[TokenSequence]) -> None:
    """Ranks hold different data. If one calls other collectives than the rest, all of them wait indefinitely."""
    recorded = []
    rows = [[row] for row in range(len(sequences))]
    cases = [(some_advantages(len(sequences)), rows), ([0.0] * len(sequences), rows), ([0.0] * len(sequences), [])]
    with lone_rank():
        for advantages, micro_batches in cases:
            with record_calls() as calls:
                gradient(pad(sequences), advantages, micro_batches)
            recorded.append(calls)
    assert recorded[1:] == recorded[:1] * 2


@pytest.mark.slow
def test_two_ranks_with_any_shares_have_the_gradient_of_one() -> None:
    launch_ranks(Path(__file__).with_name("compact_grpo_rank.py"), num_ranks=2)
