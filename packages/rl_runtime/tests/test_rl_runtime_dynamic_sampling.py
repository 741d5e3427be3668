"""Dynamic sampling (DAPO): groups without spread are replaced. ReMax: the score of a greedy response as baseline."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_runtime_client_loops import CLOSES_LOOPS, OwnLoop
from rl_runtime_scripted_client import Tokenizer, failure, sample
from rl_runtime_user_functions import Prompt

from plinth_testing.errors import raises
from rl_core import DynamicSelection, ExtraRollout
from rl_data import PromptSampler
from rl_runtime.errors import InputError, RolloutFailed
from rl_runtime.job_config import JobConfig
from rl_runtime.rollout.config import DynamicSamplingConfig, EpisodeConfig, OversamplingConfig
from rl_runtime.rollout.dynamic_sampling import num_replacements
from rl_runtime.rollout.groups import to_state
from rl_runtime.rollout.phase import RolloutPhase
from rl_runtime.rollout.scoring import Scorer
from rl_runtime.rollout.step_rollouts import StepRollouts
from rl_runtime.training.metrics import rollout_metrics
from rl_runtime.training.policy import PolicyConfig
from rollout_vllm import Group, Request, SamplingConfig

pytestmark = CLOSES_LOOPS

RIGHT, WRONG, NO_NUMBER = 2, 3, None
"""Response tokens: the first scores 1, the second 0; a sample without a token fails."""
Answers = Sequence[int | None]


class LastToken(Tokenizer):
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return f"#### {ids[-1]}"


@dataclass
class AnsweringClient(OwnLoop):
    """Answers the prompt with the tokens (number, ...) by `answers[number]`, greedy requests by `greedy[number]`."""

    answers: Sequence[Answers]
    greedy: Answers = ()
    rounds: list[list[Any]] = field(default_factory=list)
    greedy_settings: list[SamplingConfig] = field(default_factory=list)

    async def generate(self, requests: list[Any], sampling: SamplingConfig, *, on_group: Any) -> list[Group]:
        if sampling.temperature:
            self.rounds.append(requests)
        await asyncio.sleep(0)
        groups = [self._group(request, sampling) for request in requests]
        for group in reversed(groups):  # the order of completion is not that of the prompts
            on_group(group)
        return groups

    async def generate_first(
        self, requests: list[Any], sampling: SamplingConfig, *, num_groups: int, keep_rest: bool, on_group: Any
    ) -> tuple[list[Group], list[Group]]:
        self.rounds.append(requests)
        groups = [self._group(request, sampling) for request in requests[:num_groups]]
        for group in groups:
            on_group(group)
        rest = [r if isinstance(r, Group) else Group.fresh(r, sampling.num_samples) for r in requests[num_groups:]]
        return groups, rest if keep_rest else []

    async def sample(self, request: Request, sampling: SamplingConfig) -> Group:
        """One turn of an episode."""
        return self._group(request, sampling)

    def _group(self, asked: Request | Group, sampling: SamplingConfig) -> Group:
        request = asked.request if isinstance(asked, Group) else asked
        number = request.prompt_ids[0]
        if sampling.temperature == 0:
            self.greedy_settings.append(sampling)
        tokens = self.answers[number][: sampling.num_samples] if sampling.temperature else [self.greedy[number]]
        made = enumerate(tokens)
        return Group(
            request=request,
            samples=tuple(sample(request, i, token) for i, token in made if token is not None),
            failures=tuple(failure(request, i) for i, token in enumerate(tokens) if token is None),
        )

    async def fetch_metrics(self) -> dict[str, float]:
        return {"client/response_tokens": float(sum(map(len, self.rounds))), "client/num_retries": 0.0}


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(number), token_ids=(number, 7)) for number in range(count)]


def rollouts(
    client: AnsweringClient,
    scorer: Scorer,
    *,
    batch: int,
    max_rounds: int = 3,
    n: int = 2,
    phase: dict[str, Any] | None = None,
    shuffle: bool = False,
) -> StepRollouts:
    count = len(client.answers)
    return StepRollouts(
        phase=RolloutPhase(client, LastToken(), scorer=scorer, seed=1, **(phase or {})),  # type: ignore[arg-type]
        sampler=PromptSampler(count, seed=1, shuffle=shuffle),
        train_prompts=prompts(count),
        val_prompts=prompts(count),
        train_batch_size=batch,
        sampling=SamplingConfig(n=n, max_tokens=4),
        dynamic_sampling=DynamicSamplingConfig(max_rounds=max_rounds),
        validation=SamplingConfig(n=1),
    )


def collect(steps: StepRollouts, step: int = 1) -> Any:
    return steps.collect(step, lambda _: nullcontext())


def numbers(collected: Any) -> list[int]:
    """The prompts of the batch, one per group."""
    return list(dict.fromkeys(int(item.prompt.id) for item in collected.samples))


DIFFER, ALL_RIGHT, ALL_WRONG = (RIGHT, WRONG), (RIGHT, RIGHT), (WRONG, WRONG)
FAILED: Answers = (RIGHT, NO_NUMBER)


def test_groups_without_spread_are_replaced_by_fresh_prompts(scorer: Scorer) -> None:
    client = AnsweringClient([DIFFER, ALL_RIGHT, ALL_WRONG, DIFFER, ALL_RIGHT, DIFFER, DIFFER, DIFFER])
    collected = collect(rollouts(client, scorer, batch=4))
    # 2 of 4 are informative, so 4 prompts are expected to give the other 2; the last informative one is not needed.
    assert [len(requests) for requests in client.rounds] == [4, 4]
    assert numbers(collected) == [0, 3, 5, 6]
    assert list(Counter(item.prompt_id for item in collected.samples).values()) == [2, 2, 2, 2]
    metrics = rollout_metrics(collected)
    assert metrics["critic/score/mean"] == 9 / 16, "the mean over all generated samples"
    assert metrics["rollout/trained_score_mean"] == 0.5
    assert (metrics["rollout/num_samples"], [item.score for item in collected.samples]) == (8, [1, 0] * 4)
    assert metrics["rollout/num_generated_samples"] == 16
    assert metrics["rollout/num_dropped_groups"] == 3
    assert metrics["rollout/num_surplus_groups"] == 1
    assert metrics["rollout/num_sampling_rounds"] == 2
    assert not collected.note


def test_a_step_trains_on_the_groups_it_found_and_says_so(scorer: Scorer) -> None:
    client = AnsweringClient([DIFFER, *[ALL_RIGHT] * 7])
    collected = collect(rollouts(client, scorer, batch=2, max_rounds=2))
    assert numbers(collected) == [0]
    assert collected.note.startswith("1 of 2 groups have scores that differ: 5 groups were dropped in 3 rounds (mean ")


def test_a_step_without_an_informative_group_is_refused(scorer: Scorer) -> None:
    client = AnsweringClient([ALL_RIGHT] * 6)
    with pytest.raises(RolloutFailed):
        collect(rollouts(client, scorer, batch=2, max_rounds=2), step=5)


def test_spread_below_the_minimum_counts_as_none(scorer: Scorer) -> None:
    client = AnsweringClient([DIFFER] * 2)
    steps = rollouts(client, scorer, batch=2)
    steps = replace(steps, dynamic_sampling=DynamicSamplingConfig(max_rounds=1, min_spread=1.0))
    with pytest.raises(RolloutFailed):
        collect(steps)


@pytest.mark.parametrize("keep", [True, False])
def test_rounds_resume_partial_rollouts_and_leave_the_rest_to_the_next_step(scorer: Scorer, keep: bool) -> None:
    answers = [ALL_RIGHT, DIFFER, DIFFER, DIFFER, DIFFER, DIFFER, DIFFER, DIFFER]
    client = AnsweringClient(answers)
    oversampling = OversamplingConfig(extra_prompts=1, partial_rollouts=keep)
    steps = rollouts(client, scorer, batch=2, phase={"oversampling": oversampling})
    # Prompt 2 is interrupted. The second round is for one group, which has a chance of 1/2: two are asked for.
    assert numbers(collect(steps)) == ([1, 2] if keep else [1, 3])
    assert [len(requests) for requests in client.rounds] == [3, 3]
    asked = [request.prompt_id for requests in client.rounds for request in requests]
    assert len(set(asked)) == (5 if keep else 6), "a partial rollout keeps its name, a fresh prompt has its own"
    assert steps.phase.num_prompts(2) == (2 if keep else 3)
    assert numbers(collect(steps, step=2)) == ([4, 5] if keep else [6, 7])


@settings(max_examples=20, deadline=None)
@given(
    answers=st.lists(st.sampled_from([DIFFER, ALL_RIGHT, ALL_WRONG, FAILED]), min_size=1, max_size=12),
    batch=st.integers(1, 5),
    max_rounds=st.integers(1, 3),
    extra=st.integers(0, 2),
    resumed_at=st.integers(1, 3),
)
def test_a_step_is_the_first_informative_groups_of_its_prompts_in_order(
    scorer: Scorer, answers: list[Answers], batch: int, max_rounds: int, extra: int, resumed_at: int
) -> None:
    """Compared with a model in a few lines; a run resumed before any step makes the same requests."""
    options: dict[str, Any] = {"phase": {"oversampling": OversamplingConfig(extra_prompts=extra)}, "shuffle": True}
    client = AnsweringClient(answers)
    steps = rollouts(client, scorer, batch=batch, max_rounds=max_rounds, **options)
    for step in range(1, 4):
        if step == resumed_at:
            state = json.loads(json.dumps({"sampler": steps.sampler.state_dict(), "phase": steps.phase.state_dict()}))
            other_client = AnsweringClient(answers)
            other = rollouts(other_client, scorer, batch=batch, max_rounds=max_rounds, **options)
            other.sampler.load_state_dict(state["sampler"])
            other.phase.load_state_dict(state["phase"])
        client.rounds.clear()
        outcome = attempt(steps, step)
        check_step(client, answers, batch, max_rounds, extra, outcome)
        if step >= resumed_at:
            other_client.rounds.clear()
            assert attempt(other, step) == outcome
            assert requested(other_client) == requested(client)
            assert other.sampler.state_dict() == steps.sampler.state_dict()


def requested(client: AnsweringClient) -> list[list[Any]]:
    """The requests of each round, and the state of resumed groups."""
    return [[to_state(one) if isinstance(one, Group) else one for one in requests] for requests in client.rounds]


def attempt(steps: StepRollouts, step: int) -> list[tuple[int, str, float | None]] | None:
    """(prompt, group, score) of the samples of a step; None if it has nothing to train on."""
    try:
        return [(int(item.prompt.id), item.prompt_id, item.score) for item in collect(steps, step).samples]
    except RolloutFailed:
        return None


def check_step(
    client: AnsweringClient,
    answers: list[Answers],
    batch: int,
    max_rounds: int,
    extra: int,
    outcome: list[tuple[int, str, float | None]] | None,
) -> None:
    fresh = [r.prompt_ids[0] for asked in client.rounds for r in asked if isinstance(r, Request)]
    assert len(set(fresh)) == min(len(fresh), len(answers)), "no prompt twice while there are others"
    asked = [[r.request if isinstance(r, Group) else r for r in requests] for requests in client.rounds]
    names = {(r.prompt_id, r.seed) for requests in asked for r in requests}
    assert len({seed for _, seed in names}) == len({name for name, _ in names}) == len(names)
    complete = [r.prompt_ids[0] for requests in asked for r in requests[: max(1, len(requests) - extra)]]
    informative = [prompt for prompt in complete if answers[prompt] == DIFFER]
    chosen = list(dict.fromkeys((prompt, group) for prompt, group, _ in outcome or ()))
    assert [prompt for prompt, _ in chosen] == informative[:batch]
    assert outcome is None or len(outcome) == 2 * len(chosen), "groups are whole"
    assert len(asked) <= 1 + max_rounds
    assert len(informative) >= batch or len(asked) == 1 + max_rounds


@given(informative=st.integers(0, 50), dropped=st.integers(0, 50), missing=st.integers(1, 50))
def test_a_round_asks_for_at_least_the_missing_groups_and_at_most_a_step(
    informative: int, dropped: int, missing: int
) -> None:
    selection = DynamicSelection(
        index=torch.zeros(0), num_groups=informative, num_missing=missing, num_dropped=dropped, num_surplus=0
    )
    count = num_replacements(selection)
    assert missing <= count <= informative + missing
    if informative and count < informative + missing:
        expected = missing * (informative + dropped) / informative
        assert expected <= count < expected + 1


# ---- the greedy baseline of ReMax ------------------------------------------------------------------------------------
GREEDY = {"extra_rollout": ExtraRollout()}


def test_every_sample_has_the_score_of_its_prompts_greedy_response(scorer: Scorer) -> None:
    client = AnsweringClient([DIFFER, ALL_WRONG, ALL_RIGHT], greedy=[WRONG, RIGHT, RIGHT])
    collected = collect(rollouts(client, scorer, batch=3, max_rounds=0, phase=GREEDY))
    baselines = [(int(item.prompt.id), item.baseline_score) for item in collected.samples]
    assert baselines == [(0, 0.0), (0, 0.0), (1, 1.0), (1, 1.0), (2, 1.0), (2, 1.0)]
    assert len(client.rounds) == 1
    assert [(s.n, s.temperature, s.max_tokens) for s in client.greedy_settings] == [(1, 0.0, 4)] * 3
    assert rollout_metrics(collected)["rollout/baseline_score_mean"] == pytest.approx(2 / 3)


def test_groups_may_have_one_sample_with_a_greedy_baseline(scorer: Scorer) -> None:
    client = AnsweringClient([[RIGHT], [WRONG]], greedy=[WRONG, WRONG])
    collected = collect(rollouts(client, scorer, batch=2, n=1, max_rounds=0, phase=GREEDY))
    assert [item.score for item in collected.samples] == [1.0, 0.0]
    client = AnsweringClient([FAILED], greedy=[WRONG])
    collected = collect(rollouts(client, scorer, batch=1, max_rounds=0, phase=GREEDY))
    assert [(item.score, item.baseline_score) for item in collected.samples] == [(1.0, 0.0)]


def test_a_prompt_whose_greedy_response_failed_is_left_out_with_the_reason(scorer: Scorer) -> None:
    client = AnsweringClient([DIFFER, DIFFER], greedy=[NO_NUMBER, RIGHT])
    collected = collect(rollouts(client, scorer, batch=2, max_rounds=0, phase=GREEDY))
    assert numbers(collected) == [1]
    assert (collected.num_failed, collected.reason) == (2, "no extra response: server gone")


def test_without_a_greedy_baseline_and_in_validation_no_greedy_response_is_generated(scorer: Scorer) -> None:
    client = AnsweringClient([DIFFER, DIFFER])
    collected = collect(rollouts(client, scorer, batch=2, max_rounds=0))
    assert {item.baseline_score for item in collected.samples} == {None}
    assert "rollout/baseline_score_mean" not in rollout_metrics(collected)
    rollouts(client, scorer, batch=2, max_rounds=0, phase=GREEDY).validate(1)
    assert client.greedy_settings == []


def test_the_greedy_baseline_of_episodes_is_a_greedy_episode(scorer: Scorer) -> None:
    client = AnsweringClient([(RIGHT,), (WRONG,)], greedy=[WRONG, RIGHT])
    episode = EpisodeConfig(function="rl_runtime_user_functions:two_turns")
    collected = collect(rollouts(client, scorer, batch=2, max_rounds=0, phase=GREEDY | {"episode": episode}))
    scored = [(item.prompt.id, item.score, item.baseline_score, item.num_turns) for item in collected.samples]
    assert scored == [("0", 1.0, 0.0, 2)] * 2 + [("1", 0.0, 1.0, 2)] * 2
    assert [setting.temperature for setting in client.greedy_settings] == [0.0] * 4


def test_environments_that_wait_for_others_have_their_prompts_beside_greedy_ones(scorer: Scorer) -> None:
    """The two greedy episodes end long before the others, which run one after the other."""
    client = AnsweringClient([DIFFER, DIFFER], greedy=[WRONG, RIGHT])
    episode = EpisodeConfig(environment="rl_runtime_user_functions:Echo", max_environments=1)
    steps = rollouts(client, scorer, batch=2, max_rounds=0, phase=GREEDY | {"episode": episode})
    steps = replace(steps, sampling=SamplingConfig(n=2, max_tokens=32))
    collected = collect(steps)
    assert (collected.num_failed, collected.reason) == (0, "")
    assert [(item.score, item.baseline_score) for item in collected.samples] == [(3.0, 3.0)] * 4


def config_with(greedy: bool) -> Callable[..., JobConfig]:
    class Greedy(JobConfig):
        algorithm = PolicyConfig(advantage="remax")
        extra_rollout = ExtraRollout()

    return Greedy if greedy else JobConfig


@pytest.mark.parametrize(
    ("greedy", "settings", "field"),
    [
        (True, {"oversampling": OversamplingConfig(extra_prompts=1)}, "oversampling.extra_prompts"),
        (True, {"dynamic_sampling": DynamicSamplingConfig(max_rounds=1)}, "dynamic_sampling.max_rounds"),
        (
            False,
            {"dynamic_sampling": DynamicSamplingConfig(max_rounds=2), "sampling": SamplingConfig(n=1)},
            "dynamic_sampling.max_rounds",
        ),
    ],
)
def test_sampling_that_cannot_hold_is_refused(greedy: bool, settings: dict[str, Any], field: str) -> None:
    with raises(InputError, field=field):
        config_with(greedy)(**settings)
    assert JobConfig().extra_rollout is None


@pytest.mark.parametrize(
    "settings", [{"max_rounds": -1}, {"min_spread": -0.1}, {"min_spread": float("nan")}, {"min_spread": 0.5}]
)
def test_wrong_values_of_dynamic_sampling_are_refused(settings: dict[str, Any]) -> None:
    with raises(InputError, field=next(iter(settings))):
        DynamicSamplingConfig(**settings)
