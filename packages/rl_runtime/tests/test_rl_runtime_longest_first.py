"""Groups with the longest earlier responses are requested first; the batch of the step is the same."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rl_runtime_client_loops import CLOSES_LOOPS
from rl_runtime_scripted_client import ScriptedClient, phase, sample
from rl_runtime_user_functions import Prompt

from rl_runtime.rollout.config import OversamplingConfig
from rl_runtime.rollout.longest_first import EarlierLengths
from rl_runtime.rollout.scoring import Scorer
from rollout_vllm import Group, Request, SamplingConfig

pytestmark = CLOSES_LOOPS


def request(name: str, number: int = 0) -> Request:
    return Request(prompt_id=f"{number}:{name}", prompt_ids=[1], prompt=Prompt(name))


@given(
    lengths=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 9), max_size=6),
    asked=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), max_size=12),
)
def test_every_group_is_requested_once_unfinished_ones_first_then_the_longest(
    lengths: dict[str, int], asked: list[tuple[str, bool]]
) -> None:
    earlier = EarlierLengths()
    for name, length in lengths.items():
        part = sample(request(name), 0, 2)
        earlier.note(Group(request=request(name), samples=(Group.fresh(request(name), 1).samples[0], part)))
        assert earlier.by_prompt[name] == 0.5  # the mean of an empty and a one-token response
        earlier.by_prompt[name] = float(length)
    starts: list[Any] = [request(name, number) for number, (name, _) in enumerate(asked)]
    starts = [Group.fresh(one, 2) if asked[i][1] else one for i, one in enumerate(starts)]
    ordered = earlier.order(starts)
    assert sorted(map(id, ordered)) == sorted(map(id, starts))
    unfinished = [one for one in starts if isinstance(one, Group)]
    assert ordered[: len(unfinished)] == unfinished
    average = sum(lengths.values()) / len(lengths) if lengths else 0.0
    expected = [lengths.get(one.prompt.id, average) for one in ordered[len(unfinished) :]]
    assert expected == sorted(expected, reverse=True)


class ByPrompt(ScriptedClient):
    """The number of tokens is a function of the prompt, as is the score."""

    async def generate(self, requests: list[Request], sampling: SamplingConfig, *, on_group: Any) -> list[Group]:
        self.responses = [[len(r.prompt.id)] * 2 for r in requests]
        return await super().generate(requests, sampling, on_group=on_group)


def test_the_order_of_requests_changes_and_the_batch_does_not(scorer: Scorer) -> None:
    prompts = [Prompt("a"), Prompt("aaaa"), Prompt("aa"), Prompt("aaa")]
    plain, ordered = ByPrompt([], n=2), ByPrompt([], n=2)
    config = OversamplingConfig(longest_first=True)
    phases = [phase(plain, scorer), phase(ordered, scorer, oversampling=config)]
    for name in ("a", "aa", "aaa", "aaaa"):
        phases[1]._lengths.by_prompt[name] = float(len(name))  # type: ignore[union-attr]
    state = phases[1].state_dict()
    resumed = phase(ordered, scorer, oversampling=config)
    resumed.load_state_dict(state)
    batches = [one.collect(prompts, SamplingConfig(n=2), step=2).batch() for one in (phases[0], resumed)]
    assert [r.prompt.id for r in plain.requests] == ["a", "aaaa", "aa", "aaa"]
    assert [r.prompt.id for r in ordered.requests] == ["aaaa", "aaa", "aa", "a"]
    assert {r.prompt_id: r.seed for r in plain.requests} == {r.prompt_id: r.seed for r in ordered.requests}
    first, second = (vars(batch) for batch in batches)
    assert first.keys() == second.keys()
    assert repr(first) == repr(second)
