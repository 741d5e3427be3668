"""Configuration of the rollout: episodes, over-sampling, dynamic sampling."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import BUILTIN_MODEL
from ..rules import Feature, Rule, check_at_least, check_seconds, check_value, only

_TOOLS = "rollout_vllm:ToolEnvironment"


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """Multi-turn responses, driven by an environment or a function of yours (tools, games)."""

    function: str | None = None
    """`package.module:function`, a coroutine function that is called as `function(episode, prompt, tokenizer)` for each
    sample; null: single-turn responses. `sampling.max_tokens` limits the whole response including context. A number
    that it returns, or passes to `episode.reward(number)` after a turn, is the score; else `reward` scores."""
    environment: str | None = None
    """`package.module:Class` with `reset(prompt)` and `step(action_text) -> (observation, reward, done, info)`, instead
    of `function`. Each episode has an object of it in a process of its own. Its rewards are the score; an environment
    that gives none (None) leaves scoring to `reward`."""
    agent: str | None = None
    """`package.module:function`, instead of `function`, called as `agent(base_url, api_key, prompt)` in a process of
    its own. The policy answers what it sends to base_url (docs/environments.md). A number that it returns is the score;
    else `reward` scores."""
    call_format: str = "hermes"
    """Format of the policy's tool calls that an agent or one of `tools` gets: hermes, llama or mistral."""
    tools: tuple[str, ...] = ()
    """Tools that the policy calls, for `environment=rollout_vllm:ToolEnvironment`, which they select:
    `package.module:function`, and MCP servers as `mcp:COMMAND ARGUMENTS` or `mcp:http://HOST:PORT/mcp`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment class, or of the agent."""
    max_turns: int = 8
    """Turns after which an episode in an environment ends as it is, and further requests of an agent are refused."""
    step_timeout_s: float = 30.0
    """Seconds of `reset` and of each `step` of the environment; a slower one fails its own sample."""
    start_timeout_s: float = 60.0
    """Seconds to start the process of the environment or agent, import its module and make its object."""
    max_environments: int = 256
    """Environments or agents that run at the same time; further episodes wait."""
    isolated: bool = False
    """Shut the process of an environment or agent in: it reaches the policy and no other network, no process, no secret
    of the environment, and writes files in a temporary folder alone. Refused where the kernel denies namespaces."""
    memory_gib: float | None = None
    """Memory that the process of an environment or agent, and each one that it starts, may add; null: no limit."""
    timeout_s: float | None = None
    """Seconds after which an episode fails and is left out of the batch; null: no limit."""

    def __post_init__(self) -> None:
        self._read_tools()
        given = [name for name in ("function", "environment", "agent") if getattr(self, name) is not None]
        for name in given[1:]:
            check_value(self, name, False, f"null with a {given[0]} ({getattr(self, given[0])!r})")
        check_value(self, "options", not self.options or self.has_process, "{} without an environment or an agent")
        check_value(self, "call_format", self.call_format in ("hermes", "llama", "mistral"), "hermes, llama or mistral")
        is_read = self.call_format == "hermes" or self.agent is not None or bool(self.tools)
        check_value(self, "call_format", is_read, "hermes without an agent or tools")
        for name, is_off in (("isolated", not self.isolated), ("memory_gib", self.memory_gib is None)):
            allowed = f"{getattr(type(self), name)} without an environment or an agent"
            check_value(self, name, is_off or self.has_process, allowed)
        check_value(self, "memory_gib", self.memory_gib is None or self.memory_gib > 0, "above 0, or null")
        check_at_least(1, self, "max_turns", "max_environments")
        check_seconds(self, "step_timeout_s", "start_timeout_s", "timeout_s")

    @property
    def memory_bytes(self) -> int | None:
        """`memory_gib` in bytes."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)

    @property
    def has_process(self) -> bool:
        """True if each episode has a process of its own."""
        return self.environment is not None or self.agent is not None

    def _read_tools(self) -> None:
        """`tools` as the environment and the option that they stand for, also in a configuration that has these."""
        if self.tools:
            check_value(self, "environment", self.environment in (None, _TOOLS), f"null or {_TOOLS} with tools")
            options = {"call_format": self.call_format, **self.options, "tools": list(self.tools)}
            check_value(self, "options", self.options.get("tools", options["tools"]) == options["tools"], "no tools")
            object.__setattr__(self, "environment", _TOOLS)
            object.__setattr__(self, "options", options)


@dataclass(frozen=True, kw_only=True)
class OversamplingConfig:
    """Treatment of a step's longest responses. Such a run is not reproducible bit for bit."""

    extra_prompts: int = 0
    """Prompts requested in addition to `batch.train_batch_size`; a step proceeds once `train_batch_size` groups are
    complete. 0: it waits for all. Short responses finish first, so dropping the others biases the batch."""
    partial_rollouts: bool = True
    """Unfinished groups are resumed by the next step; their tokens keep the policy version that sampled them. False
    drops them."""

    def __post_init__(self) -> None:
        check_at_least(0, self, "extra_prompts")


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Groups whose scores do not differ are replaced by groups of fresh prompts (DAPO, arXiv:2503.14476)."""

    max_rounds: int = 0
    """Further rounds of generation in a step, each for the groups that are missing to `batch.train_batch_size`. After
    them, the step trains on the groups it has. 0: off, a step trains on all groups."""
    min_spread: float = 0.0
    """A group is kept if its maximum score exceeds its minimum by more than this."""

    def __post_init__(self) -> None:
        check_at_least(0, self, "max_rounds")
        check_value(self, "min_spread", 0 <= self.min_spread < math.inf, "0 or more")
        is_read = not self.min_spread or self.max_rounds > 0
        check_value(self, "min_spread", is_read, "0 with max_rounds=0, which keeps every group")


OVERSAMPLING = Feature(
    key="oversampling.extra_prompts",
    rules=(
        only(
            "rollout.log_probs",
            True,
            when=lambda c: c.oversampling.partial_rollouts,
            why="and with partial_rollouts responses mix policy versions",
        ),
    ),
)
DYNAMIC_SAMPLING = Feature(
    key="dynamic_sampling.max_rounds",
    rules=(
        only(
            "dynamic_sampling.max_rounds",
            0,
            when=lambda c: c.sampling.num_samples < 2,
            why="and with sampling.n=1 no scores are compared within a group",
        ),
    ),
)
GREEDY_BASELINE = Feature(
    key="algorithm.advantage",
    is_on=lambda c: c.extra_rollout is not None,
    rules=(
        only("oversampling.extra_prompts", 0, why="and a partial rollout of an earlier policy version would lack it"),
        only("dynamic_sampling.max_rounds", 0, why="and no scores are compared within a group"),
        Rule(
            field="reward.model",
            allowed="null, or a served one (reward.url, reward.service=reward_model)",
            holds=lambda c: not c.reward.model_on_ranks,
            why="which a reward model on the ranks scores too late",
        ),
    ),
)
"""ReMax."""
QUANTIZED_SERVERS = Feature(
    key="rollout.quantization",
    is_on=lambda c: c.rollout.quantization != "none",
    rules=(
        Rule(
            field="rollout.quantization",
            allowed="none without rollout.max_lora_rank",
            holds=lambda c: c.rollout.max_lora_rank is not None,
            why="and whole weights cannot be pushed into quantized layers, adapters alone can",
        ),
        only("rollout.log_probs", True, why="whose error they show"),
    ),
)
QUANTIZED_CACHE = Feature(
    key="rollout.kv_cache_dtype",
    is_on=lambda c: c.rollout.kv_cache_dtype != "auto",
    rules=(only("rollout.log_probs", True, why="whose error they show"),),
)
SPECULATIVE = Feature(
    key="rollout.speculative",
    is_on=lambda c: c.rollout.speculates,
    rules=(
        only("actor.match_servers", False, why="and matched servers compute one token a step"),
        only("actor.router_replay", "off", "R2", why="and servers would also return the experts of rejected drafts"),
        only("sampling.min_p", 0.0, why="with which vLLM verifies no drafts"),
        only("sampling.repetition_penalty", 1.0, why="and drafts are verified together"),
        only("sampling.stop", (), why="and a step may go on after the text that ends a response"),
    ),
)
MATCHED_SERVERS = Feature(
    key="actor.match_servers",
    rules=(
        only("rollout.urls", (), why="and existing servers compute with vLLM's operations"),
        Rule(
            field="rollout.dtype",
            allowed="auto or actor.dtype",
            holds=lambda c: c.rollout.dtype in ("auto", c.actor.model_dtype),
        ),
        only("rollout.log_probs", True),
        only("sync.running_requests", "auto", "wait", "recompute", why="and kept caches are those of older weights"),
        *(
            only(f"sampling.{name}", value, why="and log-probs are those of the whole, unchanged distribution")
            for name, value in (
                ("temperature", 1.0),
                ("top_p", 1.0),
                ("top_k", -1),
                ("min_p", 0.0),
                ("min_tokens", 0),
                ("repetition_penalty", 1.0),
            )
        ),
    ),
)
"""Servers and ranks compute the same bits (docs/exact.md)."""
ROUTER_REPLAY = Feature(
    key="actor.router_replay",
    is_on=lambda c: c.actor.router_replay != "off",
    rules=(
        only(
            "actor.router_replay",
            "off",
            when=lambda c: c.model.path == BUILTIN_MODEL,
            why="and the built-in model is no mixture of experts",
        ),
        only(
            "rollout.routes",
            True,
            None,
            when=lambda c: c.actor.router_replay == "R3",
            why="which replays the routes of the servers",
        ),
    ),
)
SERVED_ADAPTERS = Feature(
    key="rollout.max_lora_rank",
    rules=(
        Rule(
            field="rollout.max_lora_rank",
            allowed="null without actor.lora.rank",
            holds=lambda c: c.actor.lora is not None,
            why="and there are no adapters to serve",
        ),
        Rule(
            field="actor.lora.rank",
            allowed="at most rollout.max_lora_rank",
            holds=lambda c: c.actor.lora.rank <= c.rollout.max_lora_rank,
            remedy="rollout.max_lora_rank=null merges adapters into the weights that are pushed",
        ),
    ),
)
