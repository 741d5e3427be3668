"""Configuration of scoring: the reward function, terms, the reward model, services."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from plinth_base.errors import shown
from rl_data import REWARDS, Reward, RewardConfig, make_reward
from rollout_vllm.config import read_api_key

from ..config import FrozenModel, expand_folder
from ..errors import InputError
from ..rules import Feature, check_at_least, check_seconds, check_value, only
from .reward_services import SERVICES

EPISODE_TERM = "episode"
"""Name of what an episode scored itself, beside configured terms."""
MODEL_TERM = "model"
"""Name of what the reward model scored."""


@dataclass(frozen=True, kw_only=True)
class RewardTermConfig:
    """One of several rewards; the score of a sample is the sum of their values times their weights."""

    function: str
    """A reward of the registry (gsm8k, math, multiple_choice, reasoning_gym, format, length, code), or
    `package.module:function`."""
    weight: float = 1.0
    """Factor of the value; 0 writes its metrics only."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the registry's reward, or keyword arguments of the function."""
    batched: bool = False
    """The function is called once for a group, with a list of responses and a list of prompts, and returns a list."""

    def __post_init__(self) -> None:
        check_value(self, "weight", math.isfinite(self.weight), "a finite number")
        is_own = ":" in self.function
        check_value(self, "function", is_own or self.is_registered, f"{', '.join(REWARDS)}, or package.module:function")
        check_value(self, "batched", is_own or not self.batched, "false with a reward of the registry")
        if self.is_registered:
            self.registered()

    @property
    def is_registered(self) -> bool:
        return self.function in REWARDS

    def registered(self) -> Reward:
        """The reward of the registry. Raises InputError if an option is not allowed."""
        try:
            return make_reward(self.function, self.options)
        except ValueError as error:
            raise InputError(str(error), field="options") from None


@dataclass(frozen=True, kw_only=True)
class ScoringConfig(RewardConfig):
    """Scores of responses, computed in processes of their own during the rollout."""

    terms: Mapping[str, RewardTermConfig] = field(default_factory=dict)
    """Several rewards with weights, by a name of yours, as in `reward.terms.brief.function=length`. Validation accuracy
    is the share of samples whose first term is full. Empty: one reward, given by the keys below."""
    function: str | None = None
    """`package.module:function`, called as `function(response_text, prompt) -> float` instead of the reward of the
    prompt's data source; `async def` too. A sample whose call raises or returns no finite number is left out of the
    batch. Parameters named `num_tokens` and `finish_reason` get those of the response. What it prints is in
    `rewards/` of the run folder."""
    batched: bool = False
    """`function` is called once for a group, with a list of responses and a list of prompts, and returns a list."""
    answer: str | None = None
    """`package.module:function`, called as `function(response_text)`: the answer of a response, or None, on which
    validations with several samples vote (`maj@n`). null: the answer that the reward extracts (gsm8k, math,
    multiple_choice)."""
    model: str | None = None
    """A reward model: a Hugging Face sequence-classification folder with one label, or OWNER/NAME after `hf download`,
    with the policy's vocabulary. It reads the tokens of prompt and response; its output at the last token is the score,
    which has no bounds. It is frozen on the actor's ranks and scores after each rollout, or with
    `service=reward_model` it is behind `url`. `terms` and rewards of episodes are added to it."""
    model_weight: float = 1.0
    """Factor of the reward model's output; 0 writes its metrics only."""
    url: str | None = None
    """A service that scores instead of a function: `http://host:port/path`, or `http://host:port` of a vLLM server for
    the other kinds of `service`. A sample without a score is left out of the batch."""
    service: str = "http"
    """Kind of `url`. `http`: a service that receives prompt, response, ground_truth, data_source and extra as JSON
    and answers `{"score": number}`. `classification`, `pooling`: a classifier or reward model behind vLLM's /classify
    or /pooling, which reads prompt and response. `reward_model`: the folder `model` behind vLLM's /classify
    (`vllm serve FOLDER --runner pooling`), which gets token ids. `judge`: a chat model. `reward_services.py` may have
    more."""
    judge_prompt: str | None = None
    """The judge's prompt, with `{prompt}`, `{response}`, `{ground_truth}`, `{data_source}` and `{extra[column]}`;
    `{{` is a brace. The response is marked as text to grade, and the judge is told to end with a line
    `SCORE <mark>: <number>`."""
    label: int = 0
    """Index of the class whose probability is the score, for `service=classification`."""
    api_key: str | None = None
    """Bearer token of the service. On a command line every user of the host could read it: write
    `reward.api_key='${oc.env:NAME}'`, or give `api_key_file`."""
    api_key_file: str | None = None
    """File with the bearer token, instead of `api_key`."""
    num_workers: int = 1
    """Scoring processes, if no service scores. Coroutine functions share one more, with 64 calls at a time."""
    timeout_s: float = 30.0
    """Seconds to score one sample; a slower one is left out of the batch."""
    start_timeout_s: float = 60.0
    """Seconds to start a scoring process and import the function's module; not part of `timeout_s`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None:
            object.__setattr__(self, "model", expand_folder("model", self.model))
        check_value(self, "service", self.service in SERVICES, ", ".join(SERVICES))
        self._check_terms()
        check_value(self, "batched", not self.batched or self.function is not None, "false without function")
        if self.url is not None:
            check_value(self, "url", _is_http(self.url), "http://host:port/path or https://…")
            check_value(self, "url", self.function is None, f"null with a function ({self.function})")
        self._check_model()
        self._check_service()
        check_value(self, "service", self.service == "http" or self.url is not None, "http where url is null")
        check_value(self, "api_key_file", self.api_key is None or self.api_key_file is None, "null if api_key is given")
        check_at_least(1, self, "num_workers")
        check_seconds(self, "timeout_s", "start_timeout_s")

    def read_api_key(self) -> str | None:
        """The bearer token, from the file if one is given. Raises RolloutConfigError if it cannot be read."""
        return read_api_key(self.api_key, self.api_key_file)

    @property
    def model_on_ranks(self) -> bool:
        """True if the reward model is on the trainer's ranks; its scores then come after the rollout."""
        return self.model is not None and self.url is None

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """The reward model, if it is on the trainer's ranks."""
        if not self.model_on_ranks:
            return ()
        return (FrozenModel(key="reward.model", path=str(self.model), head="value"),)

    @property
    def adds_up(self) -> bool:
        """True if the score is a sum of named values, to which rewards of episodes belong."""
        return bool(self.terms) or self.model is not None

    def key_of(self, term: str) -> str:
        """The configuration key of a named value; empty for the only reward."""
        if term == MODEL_TERM and self.model is not None:
            return "reward.model"
        return f"reward.terms.{term}" if term else ""

    def weight_of(self, term: str) -> float:
        """Factor of a named value; "" is the only reward."""
        if term == MODEL_TERM and self.model is not None:
            return self.model_weight
        return self.terms[term].weight if term in self.terms else 1.0

    def _check_service(self) -> None:
        service, defaults = SERVICES[self.service], {field.name: field.default for field in fields(self)}
        others = [name for each in SERVICES.values() for name in each.settings if name not in service.settings]
        for name in others:
            is_default = getattr(self, name) == defaults[name]
            check_value(self, name, is_default, f"{shown(defaults[name])} with service={self.service}")
        service.check(self)

    @property
    def _serves_model(self) -> bool:
        return SERVICES[self.service].serves_model

    def _check_model(self) -> None:
        if self.model is None:
            check_value(
                self, "model", not self._serves_model, "with service=reward_model the folder that the server serves"
            )
            check_value(self, "model_weight", self.model_weight == 1, "1 where model is null")
            return
        check_value(self, "model_weight", math.isfinite(self.model_weight), "a finite number")
        remedy = "reward.terms add both"
        check_value(self, "model", self.function is None, f"null with a function ({self.function})", remedy=remedy)
        fits = self.url is None or self._serves_model
        check_value(self, "model", fits, f"null with service={self.service}, or service=reward_model")

    def _check_terms(self) -> None:
        scores_alone = self.function or (self.url and not self._serves_model)
        if self.terms and scores_alone:
            raise InputError("function or url score alone", field="terms", allowed="none")
        for name in ("method", "format_score"):
            default = getattr(RewardConfig(), name)
            is_default = not self.terms or getattr(self, name) == default
            check_value(self, name, is_default, f"{default} with terms", remedy=f"terms have options.{name} instead")
        for name, term in self.terms.items():
            self._check_term(name, term)
        weights = [term.weight for term in self.terms.values()] + ([] if self.model is None else [self.model_weight])
        if weights and not any(weights):
            field = "terms" if self.model is None else "model_weight"
            raise InputError("every weight is 0", field=field, allowed="at least one other weight")

    def _check_term(self, name: str, term: RewardTermConfig) -> None:
        field = f"terms.{name}"
        if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII) or name == EPISODE_TERM:
            raise InputError("bad name", field=field, allowed=f"letters, digits, _ and -, but not {EPISODE_TERM}")
        if name == MODEL_TERM and self.model is not None:
            raise InputError(f"with model, {name} is the name of the model's term", field=field, allowed="another name")
        if term.is_registered and (limit_s := term.registered().max_duration_s) >= self.timeout_s:
            raise InputError(
                f"a program of {limit_s:g} s would be left out, instead of scoring 0",
                field=f"{field}.options.timeout_s",
                value=limit_s,
                allowed=f"below timeout_s ({self.timeout_s:g})",
            )


REWARD_MODEL = Feature(
    key="reward.model",
    is_on=lambda c: c.reward.model_on_ranks,
    rules=(
        only(
            "dynamic_sampling.max_rounds",
            0,
            why="and on the ranks it scores after the rollout",
            remedy="serve it (reward.url, reward.service=reward_model)",
        ),
    ),
)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        return False
