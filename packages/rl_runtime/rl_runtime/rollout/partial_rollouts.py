"""Partial rollouts: unfinished groups of a step with their tokens so far, which the next step resumes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from rl_data import Prompt
from rollout_vllm import PartialGroup, Request, VersionSpan
from rollout_vllm.samples import PartialSample

from ..experience import PromptLike


@dataclass(frozen=True, kw_only=True)
class PartialRollout:
    """An unfinished group and its prompt."""

    prompt: PromptLike
    group: PartialGroup

    @property
    def num_tokens(self) -> int:
        """Response tokens of all samples so far."""
        return sum(len(sample.response_ids) for sample in self.group.samples)

    def to_state(self) -> dict[str, Any]:
        """JSON-able."""
        prompt = {name.name: getattr(self.prompt, name.name) for name in fields(Prompt)}
        return {
            "prompt": prompt,
            "request": asdict(self.group.request),
            "samples": list(map(asdict, self.group.samples)),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "PartialRollout":
        """The inverse of `to_state`, also after JSON."""
        prompt: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in state["prompt"].items()
        }
        samples = [
            PartialSample(**dict(sample) | {"version_spans": tuple(VersionSpan(*s) for s in sample["version_spans"])})
            for sample in state["samples"]
        ]
        group = PartialGroup(request=Request(**state["request"]), samples=tuple(samples))
        return cls(prompt=Prompt(**prompt), group=group)
