"""Several rewards with weights, coroutine and batched functions, episodes that score themselves."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rl_runtime_samples import group, sample
from rl_runtime_user_functions import Prompt

from plinth_testing.errors import raises
from rl_data import make_reward
from rl_runtime.app.first_prompts import check_functions
from rl_runtime.errors import InputError
from rl_runtime.rollout.config import EpisodeConfig
from rl_runtime.rollout.scoring import Scorer, load_reward, rewards_of_rows
from rl_runtime.rollout.scoring_config import RewardTermConfig, ScoringConfig
from rl_runtime.training.metrics import term_metrics
from rl_runtime.training.record import rollout_record
from rollout_vllm import Group, RewardPool, Sample

MODULE = "rl_runtime_user_functions"


def draft(text: str, prompt: Prompt | None = None, *, tokens: int = 3, score: float | None = None) -> Sample:
    return sample(tokens, prompt=prompt or Prompt("a"), text=text, score=score)


def terms(**given: Mapping[str, Any]) -> dict[str, RewardTermConfig]:
    return {name: RewardTermConfig(**term) for name, term in given.items()}


def scores(config: ScoringConfig, drafts: Sequence[Sample], **options: Any) -> Group:
    with Scorer(config, **{"report": lambda _: None, **options}) as scorer:
        return asyncio.run(scorer.score(numbered(drafts)))


def numbered(drafts: Sequence[Sample]) -> Group:
    return group([replace(one, sample_index=index) for index, one in enumerate(drafts)])


def messages(scored: Group) -> list[str]:
    return [failure.message for failure in scored.failures]


SEVERAL = terms(
    correct={"function": "math"},
    brief={"function": "length", "weight": 0.5, "options": {"limit": 2, "margin": 2}},
    level={"function": f"{MODULE}:level_reward", "weight": -0.1},
    watched={"function": "format", "weight": 0, "options": {"pattern": "[0-9]+"}},
    later={"function": f"{MODULE}:slow_reward", "options": {"seconds": 0.0, "scale": 10.0}},
)


def test_the_score_is_the_weighted_sum_of_terms() -> None:
    lines: list[str] = []
    prompt = Prompt("a", extra={"level": 4})
    drafts = [draft("2", prompt), draft("\\boxed{3}", prompt, tokens=2), draft("2", Prompt("b"))]
    config = ScoringConfig(terms=SEVERAL, timeout_s=20)
    with Scorer(config, report=lines.append) as scorer:
        scored = asyncio.run(scorer.score(numbered(drafts)))
        right, wrong = scored.samples
        assert right.reward_terms == {"correct": 1.0, "brief": 0.5, "level": 4.0, "watched": 1.0, "later": 10.0}
        assert right.score == pytest.approx(1 + 0.25 - 0.4 + 10)
        assert wrong.reward_terms["correct"] == 0
        assert wrong.score == pytest.approx(0.5 - 0.4 + 10)
        assert messages(scored) == ["no reward: reward.terms.level: KeyError: 'level'"]
        assert [scorer.is_full(one) for one in scored.samples] == [True, False], "the first term decides"
    metrics = term_metrics(scored.samples)
    assert metrics["reward/correct/mean"] == metrics["reward/correct/std"] == 0.5
    assert (metrics["reward/brief/mean"], metrics["reward/level/std"]) == (0.75, 0)
    record = rollout_record(replace(right, baseline_score=0.5), 3)
    assert (record["reward_terms"], record["baseline_score"], record["group"]) == (right.reward_terms, 0.5, 3)
    assert lines == []


def test_an_episodes_own_score_is_kept_and_terms_are_added() -> None:
    drafts = [draft("1 2", score=0.25), draft("2")]
    alone = scores(ScoringConfig(function=f"{MODULE}:length_reward"), drafts)
    assert [one.score for one in alone.samples] == [0.25, 1.0]
    assert alone.samples[0].reward_terms == {}
    both = scores(ScoringConfig(terms=terms(brief={"function": "length", "options": {"limit": 9}})), drafts)
    assert [one.score for one in both.samples] == [1.25, 1.0]
    assert both.samples[0].reward_terms == {"episode": 0.25, "brief": 1.0}


def test_a_sum_that_float32_cannot_hold_is_no_score() -> None:
    """Else the group's advantages would be NaN."""
    huge = {"function": f"{MODULE}:level_reward", "weight": 1e20}
    drafts = [draft("x", Prompt("a", extra={"level": level})) for level in (1e20, 1e308, 1.0)]
    scored = scores(ScoringConfig(terms=terms(a=huge)), drafts)
    assert messages(scored) == [
        "no reward: the weighted sum of reward.terms is 1e+40; allowed: -1e+30 to 1e+30",
        "no reward: reward.terms.a: the reward is 1e+308; allowed: -1e+30 to 1e+30",
    ]
    assert [one.score for one in scored.samples] == [1e20]


def test_coroutine_functions_wait_together() -> None:
    drafts = [draft("x", Prompt(name)) for name in ["fine"] * 200 + ["hangs", "raises"]]
    config = ScoringConfig(function=f"{MODULE}:slow_reward", timeout_s=2.0)
    scores(config, drafts[:1])
    begin = time.monotonic()
    scored = scores(config, drafts)
    assert time.monotonic() - begin < 50, "one after the other the 200 would take 60 seconds"
    assert [one.score for one in scored.samples] == [1.0] * 200
    assert messages(scored) == ["no reward: no reward within 2 s", "no reward: RuntimeError: no idea"]


def test_a_batched_function_gets_its_group(tmp_path: Path) -> None:
    config = ScoringConfig(function=f"{MODULE}:rank_reward", batched=True, timeout_s=20)
    drafts = [draft("c"), draft("a"), draft("b")]
    scored = scores(config, drafts, printed_dir=tmp_path / "rewards")
    assert [one.score for one in scored.samples] == [302.0, 300.0, 301.0]
    short = scores(config, [draft("a", Prompt("short")), draft("b", Prompt("short"))])
    assert set(messages(short)) == {"no reward: ValueError: the batched reward has 1 values for 2 responses"}
    assert any("ranking" in log.read_text() for log in (tmp_path / "rewards").iterdir()), "by any of the processes"


@pytest.mark.parametrize(
    ("config", "calls"),
    [
        (ScoringConfig(method="flexible"), [2]),
        (ScoringConfig(terms=terms(brief={"function": "length", "options": {"limit": 9}})), [2]),
        (ScoringConfig(terms=terms(correct={"function": "math"})), [None, None]),
    ],
)
def test_one_call_scores_a_group_by_a_quick_rule(
    config: ScoringConfig, calls: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int | None] = []
    submit = RewardPool._submit
    monkeypatch.setattr(RewardPool, "_submit", lambda *given: made.append(given[-1]) or submit(*given))
    assert [one.score for one in scores(config, [draft("2"), draft("\\boxed{2}")]).samples] == [1.0, 1.0]
    assert made == calls


@pytest.mark.parametrize(
    "term",
    [
        {"function": "nowhere:f"},
        {"function": f"{MODULE}:length_reward", "options": {"x": 1}},
        {"function": f"{MODULE}:not_callable"},
    ],
)
def test_terms_that_cannot_be_called_are_refused(term: dict[str, Any]) -> None:
    with raises(InputError, field="reward.terms.a.function", value=term["function"]):
        check_functions(EpisodeConfig(), ScoringConfig(terms=terms(a=term)))


def test_what_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(InputError, field="reward.terms.a.function", value="math"):
        check_functions(EpisodeConfig(), ScoringConfig(terms=terms(a={"function": "math"})))


def test_code_says_at_the_start_what_programs_can_reach() -> None:
    lines: list[str] = []
    scores(ScoringConfig(terms=terms(a={"function": "code"})), [], report=lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("code reward: ")


def test_only_rewards_of_the_registry_look_at_rows() -> None:
    assert rewards_of_rows(ScoringConfig(), EpisodeConfig()) is None
    assert rewards_of_rows(ScoringConfig(function="a:b"), EpisodeConfig()) == ()
    assert rewards_of_rows(ScoringConfig(url="http://a/b"), EpisodeConfig()) == ()
    named = terms(a={"function": "math"}, b={"function": "a:b"})
    assert rewards_of_rows(ScoringConfig(terms=named), EpisodeConfig()) == (make_reward("math"),)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"url": "localhost:8000"}, "url"),
        ({"url": "http://a:port/score"}, "url"),
        ({"url": "http:///score"}, "url"),
        ({"url": "http://a/b", "function": "a:b"}, "url"),
        ({"url": "http://a", "service": "judge"}, "judge_prompt"),
        ({"service": "pooling"}, "service"),
        ({"url": "http://a", "service": "judge", "judge_prompt": "{answer}"}, "judge_prompt"),
        ({"url": "http://a", "service": "judge", "judge_prompt": 'as {"score": 1}'}, "judge_prompt"),
        ({"url": "http://a", "service": "judge", "judge_prompt": "{}"}, "judge_prompt"),
        ({"url": "http://a", "judge_prompt": "Grade {response}"}, "judge_prompt"),
        ({"url": "http://a", "service": "pooling", "label": 1}, "label"),
        ({"url": "http://a", "service": "classification", "label": -1}, "label"),
        ({"batched": True}, "batched"),
        ({"terms": {"a": {"function": "length"}}}, "options"),
        ({"terms": {"a": {"function": "nonsense"}}}, "function"),
        ({"terms": {"a": {"function": "math", "weight": math.inf}}}, "weight"),
        ({"terms": {"a": {"function": "math", "batched": True}}}, "batched"),
        ({"terms": {"a": {"function": "math", "weight": 0}}}, "terms"),
        ({"terms": {"a b": {"function": "math"}}}, "terms.a b"),
        ({"terms": {"a": {"function": "math"}}, "method": "flexible"}, "method"),
        ({"terms": {"episode": {"function": "math"}}}, "terms.episode"),
        ({"terms": {"a": {"function": "math"}}, "function": "a:b"}, "terms"),
        ({"terms": {"a": {"function": "code", "options": {"timeout_s": 30}}}}, "terms.a.options.timeout_s"),
        ({"num_workers": 0}, "num_workers"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"start_timeout_s": 0}, "start_timeout_s"),
    ],
)
def test_scoring_that_cannot_work_is_refused(settings: dict[str, Any], field: str) -> None:
    def scoring() -> ScoringConfig:
        terms = {name: RewardTermConfig(**term) for name, term in settings.get("terms", {}).items()}
        return ScoringConfig(**{**settings, "terms": terms})

    with raises(InputError, field=field):
        scoring()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.at_all:f", "cannot be imported"),
        ("rl_runtime_user_functions", "allowed: package.module:function"),
        ("rl_runtime_user_functions:absent", "no function 'absent'"),
        ("rl_runtime_user_functions:not_callable", "no function"),
        ("rl_runtime_user_functions:takes_too_many", "cannot be called as"),
    ],
)
def test_a_wrong_reward_is_refused(name: str, message: str) -> None:
    with raises(InputError, field="reward.function", value=name) as refused:
        load_reward(name)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise RuntimeError('no\\nlicense')", "RuntimeError: no license"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_module_that_does_not_import_is_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sys.exit(0) in it must not end the run with success."""
    (tmp_path / "plinth_bad_reward.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with raises(InputError, field="reward.function", value="plinth_bad_reward:f") as refused:
        load_reward("plinth_bad_reward:f")
    assert message in refused.value.problem
