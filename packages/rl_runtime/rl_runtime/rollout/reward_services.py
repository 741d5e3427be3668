"""Services that score responses over HTTP, by their name in `reward.service`.

A new service is an entry of `SERVICES`: how to ask it, and what it reads of a sample.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rollout_vllm
from plinth_base import Endpoint

from ..errors import InputError
from ..rules import check_at_least, check_value

if TYPE_CHECKING:
    from rollout_vllm import RemoteReward, Sample

    from .scoring_config import ScoringConfig

JUDGE_FIELDS_OF_DATA = ("prompt", "ground_truth", "data_source", "extra")
"""Fields of a judge prompt that the policy did not write."""
JUDGE_FIELDS = ("response", *JUDGE_FIELDS_OF_DATA)
"""Fields that a judge prompt can use."""


def _fields_of(sample: "Sample") -> dict[str, Any]:
    return {
        "prompt": sample.prompt.text,
        "response": sample.text,
        "ground_truth": sample.prompt.ground_truth,
        "data_source": sample.prompt.data_source,
        "extra": dict(sample.prompt.extra),
    }


@dataclass(frozen=True, kw_only=True)
class RewardService:
    """A kind of service.

    connect: makes the client from the settings, the service's address and the time limit. It may be a `RemoteReward`
    with a path, a body and a reader of the answer. reads: the value that the client gets for a sample.
    settings: keys of the section that no other service reads. check: raises InputError for a value of these.
    serves_model: the service is the reward model of `reward.model`, whose score adds to terms.
    """

    connect: Callable[["ScoringConfig", Endpoint, float], "RemoteReward"]
    reads: Callable[["Sample"], Any] = lambda sample: f"{sample.prompt.text}{sample.text}"
    settings: tuple[str, ...] = ()
    check: Callable[["ScoringConfig"], None] = lambda config: None
    serves_model: bool = False


def _connect_judge(config: "ScoringConfig", endpoint: Endpoint, timeout_s: float) -> "RemoteReward":
    assert config.judge_prompt is not None
    trusted = JUDGE_FIELDS_OF_DATA
    return rollout_vllm.judge_reward(endpoint, prompt=config.judge_prompt, trusted=trusted, timeout_s=timeout_s)


def _check_judge_prompt(config: "ScoringConfig") -> None:
    is_given = config.judge_prompt is not None
    check_value(config, "judge_prompt", is_given, "with service=judge the text of the judge's prompt")
    try:
        str(config.judge_prompt).format(**{**dict.fromkeys(JUDGE_FIELDS, ""), "extra": defaultdict(str)})
    except (LookupError, ValueError, AttributeError) as error:
        names = ", ".join(f"{{{name}}}" for name in JUDGE_FIELDS)
        raise InputError(
            f"{type(error).__name__}: {error}",
            field="judge_prompt",
            value=config.judge_prompt,
            allowed=f"text with {names}, and {{{{ and }}}} for braces",
        ) from None


SERVICES: Mapping[str, RewardService] = {
    "http": RewardService(
        connect=lambda config, endpoint, timeout_s: rollout_vllm.http_reward(
            endpoint.url, api_key=endpoint.api_key, timeout_s=timeout_s
        ),
        reads=_fields_of,
    ),
    "classification": RewardService(
        connect=lambda config, endpoint, timeout_s: rollout_vllm.classification_reward(
            endpoint, label=config.label, timeout_s=timeout_s
        ),
        settings=("label",),
        check=lambda config: check_at_least(0, config, "label"),
    ),
    "pooling": RewardService(
        connect=lambda config, endpoint, timeout_s: rollout_vllm.pooling_reward(endpoint, timeout_s=timeout_s)
    ),
    "reward_model": RewardService(
        connect=lambda config, endpoint, timeout_s: rollout_vllm.scalar_reward(endpoint, timeout_s=timeout_s),
        reads=lambda sample: sample.token_ids.tolist(),
        serves_model=True,
    ),
    "judge": RewardService(
        connect=_connect_judge, reads=_fields_of, settings=("judge_prompt",), check=_check_judge_prompt
    ),
}


def connect_service(config: "ScoringConfig", url: str) -> "RemoteReward":
    """The client of the configured service."""
    endpoint = Endpoint(url.rstrip("/") if config.service != "http" else url, config.read_api_key())
    return SERVICES[config.service].connect(config, endpoint, config.timeout_s)
