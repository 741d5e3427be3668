"""Groups that a step did not wait for: kept with all tokens so far, and gone on with by the next step."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from rl_data import Prompt
from rollout_vllm import PartialGroup, Request, VersionSpan
from rollout_vllm.samples import PartialSample

from ..experience import PromptLike


@dataclass(frozen=True, kw_only=True)
class PartialRollout:
    """A group that is not finished, and its prompt."""

    prompt: PromptLike
    group: PartialGroup

    @property
    def num_tokens(self) -> int:
        """Response tokens so far, of all its samples."""
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
        """What `to_state` gave, also after JSON."""
        prompt = dict(state["prompt"]) | {"token_ids": tuple(state["prompt"]["token_ids"])}
        samples = [
            PartialSample(**dict(sample) | {"version_spans": tuple(VersionSpan(*s) for s in sample["version_spans"])})
            for sample in state["samples"]
        ]
        group = PartialGroup(request=Request(**state["request"]), samples=tuple(samples))
        return cls(prompt=Prompt(**prompt), group=group)
