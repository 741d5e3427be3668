"""Configuration of the training API."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ds_engine import EngineConfig, LoraConfig, OptimConfig
from rl_runtime import JobConfig, TrainerConfig
from rl_runtime.rules import Feature, Rule, check_at_least, check_features, check_seconds, check_value, value_of

CLIENT_SECTIONS = ("data", "task", "reward", "episode", "oversampling", "dynamic_sampling", "sampling", "validation")
"""Sections of a job that the program of the client decides."""


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """The HTTP service."""

    host: str = "127.0.0.1"
    """Address to listen on. The API is plain HTTP: reach it from other hosts through a tunnel or a proxy with TLS."""
    port: int = 8000
    """0: a free one, which the first lines of the output name."""
    api_key_file: str | None = None
    """File with the key that clients send; it begins with `tml-`, as the SDK demands. null: the environment variable
    TINKER_API_KEY, else a random key, which is printed."""
    model_name: str | None = None
    """Name by which clients ask for the model (`base_model`), such as `Qwen/Qwen3-8B`; null: `model.path`."""
    full: bool = False
    """Train all weights in place of LoRA adapters, whatever rank the client asks for. The SDK cannot ask for it."""
    states_dir: str = "outputs/serve_states"
    """Folder of saved states and sampler weights; a server that is started again finds them there."""
    max_models: int = 4
    """Most adapters that train at a time, over one base. With `full` or ZeRO-3: one model."""
    max_request_bytes: int = 64 * 1024 * 1024
    """Largest body of a request."""
    max_pending: int = 4096
    """Most requests that wait or run; further ones get status 429, and the SDK sends them again."""
    session_timeout_s: float = 60.0
    """Time without a heartbeat after which a session has ended, and its models make room for others."""

    def __post_init__(self) -> None:
        check_value(self, "port", 0 <= self.port < 2**16, "0 to 65535")
        check_at_least(1, self, "max_models", "max_request_bytes", "max_pending")
        check_seconds(self, "session_timeout_s")


def _is_default(config: Any, *, key: str) -> bool:
    return bool(value_of(config, key) == value_of(JobConfig(), key))


SERVED = Feature(
    key="model.path",
    rules=(
        *(
            Rule(
                field=key, allowed="not set: the program of the client decides it", holds=partial(_is_default, key=key)
            )
            for key in (*CLIENT_SECTIONS, "actor.optim")
        ),
        Rule(field="actor.zero.stage", allowed="2, 3", holds=lambda c: c.actor.zero.stage > 1),
        Rule(field="actor.zero.step_each_micro", allowed="false", holds=lambda c: not c.actor.zero.step_each_micro),
        Rule(
            field="actor.lora.dropout",
            allowed="0: models would draw from the same random generators",
            holds=lambda c: not c.lora.dropout,
        ),
        Rule(field="actor.router_replay", allowed="off", holds=lambda c: c.actor.router_replay == "off"),
        Rule(field="warm_start.steps", allowed="0", holds=lambda c: not c.warm_start.trains),
        Rule(
            field="rollout.max_lora_rank",
            allowed="null with api.full",
            holds=lambda c: c.rollout.max_lora_rank is None or not c.api.full,
        ),
        Rule(field="rollout.urls", allowed="none", holds=lambda c: not c.rollout.urls),
        Rule(field="rollout.log_probs", allowed="true", holds=lambda c: c.rollout.log_probs),
        Rule(field="trainer.take_turns", allowed="never", holds=lambda c: not c.trainer.takes_turns),
        Rule(field="trainer.max_staleness", allowed="0", holds=lambda c: not c.trainer.max_staleness),
        Rule(field="trainer.keep_servers", allowed="0", holds=lambda c: not c.trainer.keep_servers),
        Rule(field="trainer.ray_address", allowed="null", holds=lambda c: c.trainer.ray_address is None),
    ),
)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(JobConfig):
    """Model, engine, rollout servers and the HTTP service; what is learned comes from clients."""

    api: ApiConfig = field(default_factory=ApiConfig)
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(experiment="serve", total_training_steps=1, take_turns="never")
    )

    def check_given(self) -> None:
        """Refuses what the service cannot do, and settings that clients decide. Of the settings as they were given:
        those of the sections above are chosen later for the memory plan."""
        check_features(self, (SERVED,))

    @property
    def lora(self) -> LoraConfig:
        """The adapters of a training client, before its rank and layers; alpha is the one of the SDK's service."""
        return self.actor.lora or LoraConfig(alpha=32)

    @property
    def num_models(self) -> int:
        """Most models that train at a time."""
        return 1 if self.api.full or self.actor.zero.stage == 3 else self.api.max_models

    @property
    def engine(self) -> EngineConfig:
        """The engine of a training client that trains all weights. Its own optimizer settings are never used, but
        for the parameters that decay."""
        return replace(self.actor, lora=None, optim=OptimConfig(lr=1e-4, weight_decay=0.01))
