"""Scores responses during the rollout: rewards by name or data source, functions of the user, or a service."""

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rl_data import Reward, UnknownDataSourceError, reward_for
from rl_data.rewards.base import AnswerReward, equal_answers
from rollout_vllm import AsyncRewardPool, Group, RemoteReward, RewardOutcome, RewardPool, Sample
from rollout_vllm.episodes.rewards import MAX_REWARD

from ..errors import InputError
from .config import EpisodeConfig
from .groups import score_of
from .hang_guard import Call, HangGuard
from .reward_services import SERVICES, connect_service
from .scoring_config import EPISODE_TERM, MODEL_TERM, RewardTermConfig, ScoringConfig
from .user_functions import load_function

_AT_ONCE = 64
"""Calls that a service, or the event loop of coroutine functions, gets at the same time."""
_FACTS: Mapping[str, Callable[[Sample], Any]] = {
    "num_tokens": lambda sample: sample.num_generated,
    "finish_reason": lambda sample: sample.finish_reason,
}
"""Facts about a sample that a function gets by keyword if it has a parameter of that name."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A scoring function, its name and key, and the facts that it takes.

    facts: names in `_FACTS`. key: the configuration key that gave it.
    """

    call: Callable[..., Any]
    key: str
    name: str
    batched: bool = False
    facts: tuple[str, ...] = ()

    @property
    def is_coroutine(self) -> bool:
        return inspect.iscoroutinefunction(self.call)

    @property
    def scores_groups(self) -> bool:
        """True if one call scores all samples of a group."""
        return self.batched or (isinstance(self.call, Reward) and self.call.is_quick)


class Scorer(ExitStack):
    """Scores responses while others are generated: functions in processes of their own, services over HTTP.

    A call that raises, times out, ends its process or gets no answer affects only its own sample (its own group, if the
    function is batched). A function whose calls all time out ends the run (`HangGuard`). Close the scorer, or use it as
    a context manager.

    Raises:
        InputError: a function cannot be imported or called, or a reward lacks what it needs of this machine.
    """

    def __init__(
        self, config: ScoringConfig, *, report: Callable[[str], None] = print, printed_dir: Path | None = None
    ) -> None:
        """
        Args:
            report: gets a line for what rewards have to say at the start.
            printed_dir: folder for what functions print, created if missing; None: it is dropped.
        """
        super().__init__()
        self._config = config
        if printed_dir is not None:
            printed_dir.mkdir(parents=True, exist_ok=True)
        functions = load_functions(config)
        for line in prepare_rewards(functions.values()):
            report(line)
        self._pools: dict[bool, RewardPool] = {}
        self._settings: dict[str, Any] = {
            "timeout_s": config.timeout_s,
            "start_timeout_s": config.start_timeout_s,
            "printed_dir": None if printed_dir is None else str(printed_dir),
        }
        self._sources = {name: self._function(function) for name, function in functions.items()}
        if config.url is not None:
            service = self.enter_context(connect_service(config, config.url))
            call = partial(_ask_service, service, config)
            name = MODEL_TERM if SERVICES[config.service].serves_model else ""
            self._sources[name] = self._guard(call, f"reward.url={config.url}", _AT_ONCE)
        elif not functions and config.model is None:
            name = "reward.function=built in"
            call = partial(_call_by_data_source, self._pool(False), config)
            whole = partial(_scores_groups_of, config)
            self._sources[""] = self._guard(call, name, config.num_workers, whole_groups=whole)
        self._full_score = _full_score(config, functions)
        self._answer = load_answer(config)

    def _function(self, function: RewardFunction) -> HangGuard:
        call = partial(call_function, self._pool(function.is_coroutine), function)
        at_once = _AT_ONCE if function.is_coroutine else self._config.num_workers
        name = f"{function.key}={function.name}"
        return self._guard(call, name, at_once, whole_groups=lambda _: function.scores_groups)

    def _guard(
        self, call: Call, source: str, at_once: int, *, whole_groups: Callable[[Sample], bool] = lambda _: False
    ) -> HangGuard:
        timeout_s = self._config.timeout_s
        return HangGuard(call, source, whole_groups=whole_groups, at_once=at_once, timeout_s=timeout_s)

    def _pool(self, is_coroutine: bool) -> RewardPool:
        """The pool for coroutine functions or that for others, started when it is first asked for."""
        if is_coroutine not in self._pools:
            pool = (
                AsyncRewardPool(max_in_flight=_AT_ONCE, **self._settings)
                if is_coroutine
                else RewardPool(num_workers=self._config.num_workers, **self._settings)
            )
            self._pools[is_coroutine] = self.enter_context(pool)
        return self._pools[is_coroutine]

    @property
    def gave_up(self) -> str:
        """Reason why scoring stopped: timeouts in a row; empty while it goes on."""
        return next((source.gave_up for source in self._sources.values() if source.gave_up), "")

    def is_full(self, sample: Sample) -> bool:
        """True if a sample counts as right in validation: its first term is full, or its score if there is one reward.

        Full is the reward's own full score for rewards of the registry, `reward.score` for functions and services.
        """
        first = next(iter(self._config.terms), "")
        return sample.reward_terms.get(first, score_of(sample)) >= self._full_score

    async def votes(self, samples: Sequence[Sample]) -> list[int] | None:
        """A number for each sample of one prompt, equal for equal answers (`AnswerReward.votes`).

        None: nothing extracts answers (`reward.answer`, or the reward), or it failed to.
        """
        by_episode = any(sample.turn_rewards is not None for sample in samples)  # no reward knows their answers
        reward = self._answer_reward(samples[0]) if samples and not by_episode else None
        vote = None if reward is None else reward.votes
        if self._answer is not None:
            vote = partial(_votes_by, self._answer)
        if not samples or vote is None:
            return None
        texts = [sample.text for sample in samples]
        call = self._pool(False).submit_batch(vote, texts, num_scores=len(texts))
        numbers = [outcome.score for outcome in await asyncio.wrap_future(call)]
        return None if None in numbers else [int(vote) for vote in numbers if vote is not None]

    async def finds_answers(self, samples: Sequence[Sample]) -> bool:
        """False if no response gives an answer; True also where nothing extracts answers."""
        for _, group in groupby(samples, lambda sample: sample.prompt_id):
            votes = await self.votes(list(group))
            if votes is None or max(votes) >= 0:
                return True
        return False

    def read_answer(self, sample: Sample) -> str:
        """The answer that the registry's reward reads in a response, in words; empty if it looks for none."""
        reward = self._answer_reward(sample)
        if reward is None or sample.turn_rewards is not None:
            return ""
        try:
            answer = reward.answer(sample.text)
        except Exception as error:  # of a parser, on a response like any other
            return f"nothing, because it fails ({type(error).__name__})"
        if answer is not None:
            return f"the answer {answer!s:.80}"
        key = next((f"terms.{name}.options.method" for name in self._config.terms), "method")
        is_strict = getattr(reward, "method", None) == "strict"
        return "no answer" + f" (reward.{key}=flexible reads the last number)" * is_strict

    def _answer_reward(self, sample: Sample) -> AnswerReward | None:
        """The reward that `is_full` asks, if it extracts answers."""
        first = next(iter(self._config.terms.values()), None)
        if first is not None:
            reward = first.registered() if first.is_registered else None
        elif self._config.function is not None or self._config.url is not None or self._config.model is not None:
            reward = None
        else:
            try:
                reward = reward_for(sample.prompt.data_source, self._config)
            except UnknownDataSourceError:  # its episode scored it
                reward = None
        return reward if isinstance(reward, AnswerReward) else None

    async def score(self, group: Group) -> Group:
        """The group with the scores of its samples; a sample without a score becomes a failure, with the reason.

        A sample whose `score` is set, by its episode, keeps it; configured terms are added to it. A reward model on the
        ranks adds to it later (`training.reward_model`).
        """
        asked = [sample for sample in group.samples if self._config.adds_up or sample.score is None]
        columns = await asyncio.gather(*(source.score(asked) for source in self._sources.values()))
        scored = {sample.sample_index: sample for sample in group.samples}
        for sample, *outcomes in zip(asked, *columns, strict=True):
            result = self._sum(sample, outcomes)
            if isinstance(result, str):
                group = group.without([sample], "reward", f"no reward: {result}")
            else:
                scored[sample.sample_index] = result
        return replace(group, samples=tuple(scored[sample.sample_index] for sample in group.samples))

    def _sum(self, sample: Sample, outcomes: Sequence[RewardOutcome]) -> Sample | str:
        """The sample with its score and the terms of it, or why it has none."""
        terms = {} if sample.score is None else {EPISODE_TERM: sample.score}
        total = sum(terms.values())
        for name, outcome in zip(self._sources, outcomes, strict=True):
            if outcome.score is None:
                key = self._config.key_of(name)
                return f"{key}: {outcome.message}" if key else outcome.message
            total += outcome.score * self._config.weight_of(name)
            terms |= {name: outcome.score} if name else {}
        if not abs(total) <= MAX_REWARD:  # nor NaN
            return f"the weighted sum of reward.terms is {total}; allowed: -{MAX_REWARD:g} to {MAX_REWARD:g}"
        return sample.changed(score=float(total), reward_terms=terms)


def _votes_by(answer: Callable[[str], Any], response_texts: Sequence[str]) -> list[int]:
    """Votes by the function `reward.answer`; called in a scoring process."""
    return equal_answers([answer(text) for text in response_texts])


async def call_function(
    pool: RewardPool, function: RewardFunction, samples: Sequence[Sample]
) -> Sequence[RewardOutcome]:
    """One outcome for each sample: of a group, if the function scores groups, else of a single one."""
    if not function.scores_groups:
        (sample,) = samples
        own_facts = {name: _FACTS[name](sample) for name in function.facts}
        return [await pool.score(function.call, sample.text, sample.prompt, **own_facts)]
    texts, prompts = [sample.text for sample in samples], [sample.prompt for sample in samples]
    facts = {name: [_FACTS[name](sample) for sample in samples] for name in function.facts}
    call = function.call.score_each if isinstance(function.call, Reward) else function.call
    return await asyncio.wrap_future(pool.submit_batch(call, texts, prompts, num_scores=len(samples), **facts))


async def _call_by_data_source(
    pool: RewardPool, config: ScoringConfig, samples: Sequence[Sample]
) -> Sequence[RewardOutcome]:
    reward = reward_for(samples[0].prompt.data_source, config)
    return await call_function(pool, RewardFunction(call=reward, key="reward", name="built in"), samples)


def _scores_groups_of(config: ScoringConfig, sample: Sample) -> bool:
    return reward_for(sample.prompt.data_source, config).is_quick


async def _ask_service(
    service: RemoteReward, config: ScoringConfig, samples: Sequence[Sample]
) -> Sequence[RewardOutcome]:
    (sample,) = samples
    return [await asyncio.wrap_future(service.submit(SERVICES[config.service].reads(sample)))]


def load_functions(config: ScoringConfig) -> dict[str, RewardFunction]:
    """The configured functions by the name of their term; "" for `reward.function`. Empty without either.

    Raises:
        InputError: a function cannot be imported or called.
    """
    if config.function is not None:
        call = load_reward(config.function, batched=config.batched)
        return {"": _reward_function(call, "reward.function", config.function, config.batched)}
    return {name: _load_term(term, f"reward.terms.{name}") for name, term in config.terms.items()}


def _load_term(term: RewardTermConfig, key: str) -> RewardFunction:
    if term.is_registered:
        return _reward_function(term.registered(), f"{key}.function", term.function, False)
    call = load_reward(term.function, key=f"{key}.function", batched=term.batched, keywords=tuple(term.options))
    call = partial(call, **term.options) if term.options else call
    return _reward_function(call, f"{key}.function", term.function, term.batched)


def _reward_function(call: Callable[..., Any], key: str, name: str, batched: bool) -> RewardFunction:
    parameters = inspect.signature(call).parameters
    facts = tuple(fact for fact in _FACTS if fact in parameters)
    return RewardFunction(call=call, key=key, name=name, batched=batched, facts=facts)


def load_reward(
    name: str, *, key: str = "reward.function", batched: bool = False, keywords: Collection[str] = ()
) -> Callable[..., Any]:
    """Imports a function that scores, plain or coroutine function.

    Raises:
        InputError: it cannot be imported or called.
    """
    arguments = ("response_texts", "prompts") if batched else ("response_text", "prompt")
    return load_function(
        name,
        key=key,
        arguments=arguments,
        keywords=keywords,
        offered=_FACTS.keys(),
        is_coroutine=None,
        advise=partial(foreign_hint, key=key),
    )


def foreign_hint(call: Callable[..., Any], key: str) -> str:
    """A sentence on how to call a function with the parameters of TRL or verl; empty for others. `key`: its key."""
    try:
        names = list(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return ""
    name, shown = getattr(call, "__name__", "function"), ", ".join(names)
    if "completions" in names:
        return (
            f"Its parameters ({shown}) are TRL's: with {key.removesuffix('function')}batched=true, name a function "
            f"`def score(response_texts, prompts): return {name}(prompts=[p.text for p in prompts], "
            "completions=response_texts)` (docs/rewards.md)."
        )
    if "solution_str" in names or {"data_source", "ground_truth"} <= set(names):
        return (
            f"Its parameters ({shown}) are verl's: name a function `def score(response_text, prompt): return "
            f"{name}(prompt.data_source, response_text, prompt.ground_truth, prompt.extra.get('extra_info'))` "
            "(docs/rewards.md)."
        )
    return ""


def load_answer(config: ScoringConfig) -> Callable[[str], Any] | None:
    """The function `reward.answer`; None without one.

    Raises:
        InputError: it cannot be imported or called.
    """
    if config.answer is None:
        return None
    return load_function(config.answer, key="reward.answer", arguments=("response_text",))


def prepare_rewards(functions: Collection[RewardFunction]) -> list[str]:
    """Checks what the registry's rewards need of this machine; returns lines for the log.

    Raises:
        InputError: something is missing.
    """
    lines = []
    for function in functions:
        if isinstance(function.call, Reward):
            try:
                lines.append(function.call.prepare())
            except ValueError as error:
                raise InputError(str(error), field=function.key, value=function.name) from error
    return list(dict.fromkeys(filter(None, lines)))


def rewards_of_rows(config: ScoringConfig, episode: EpisodeConfig) -> tuple[Reward, ...] | None:
    """The registry's rewards that score every row; None: the reward of each row's data source."""
    if episode.has_process and not config.terms:
        return ()
    if config.terms:
        return tuple(term.registered() for term in config.terms.values() if term.is_registered)
    return () if config.function is not None or config.url is not None or config.model is not None else None


def _full_score(config: ScoringConfig, functions: Mapping[str, RewardFunction]) -> float:
    first = next(iter(functions.values()), None)
    return first.call.full_score if first is not None and isinstance(first.call, Reward) else config.score
