"""Groups between drawing and training in a checkpoint: their prompt, their samples so far, and their scores."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from rl_data import Prompt
from rollout_vllm import Group

from ..samples import with_token_ids


def to_state(group: Group) -> dict[str, Any]:
    """JSON-able."""
    prompt = {one.name: getattr(group.request.prompt, one.name) for one in fields(Prompt)}
    return {"prompt": prompt, **group.to_state()}


def from_state(state: Mapping[str, Any]) -> Group:
    """The inverse of `to_state`, also after JSON."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in state["prompt"].items()
    }
    group = Group.from_state(state, prompt=Prompt(**values))
    samples = [
        replace(sample, prompt=with_token_ids(sample.prompt, sample.prompt_ids.tolist())) for sample in group.samples
    ]
    return replace(group, samples=tuple(samples))
