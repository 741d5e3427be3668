"""A client that answers with given tokens, for tests of the rollout phase without servers."""

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

from rl_runtime_client_loops import OwnLoop

from rl_runtime.rollout.phase import RolloutPhase
from rl_runtime.rollout.scoring import Scorer
from rollout_vllm import (
    Failure,
    FirstGroups,
    GroupResult,
    PartialGroup,
    Request,
    Sample,
    SamplingConfig,
    VersionSpan,
)
from rollout_vllm.client.group_run import fresh_group
from rollout_vllm.samples import PartialSample


class Tokenizer:
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return f"#### {ids[0]}"


@dataclass
class ScriptedClient(OwnLoop):
    """Answers with the response tokens it was given, one prompt's after the other's; missing samples are failures."""

    responses: list[list[int]]
    n: int
    requests: list[Any] = field(default_factory=list)
    version: int = 0

    async def generate(self, requests: list[Request], sampling: SamplingConfig, *, on_group: Any) -> list[GroupResult]:
        self.requests += requests
        groups = [self._group(request, ids) for request, ids in zip(requests, self.responses, strict=True)]
        for group in reversed(groups):  # the order of completion is not that of the prompts
            answer = on_group(group)
            if inspect.isawaitable(answer):
                await answer
        return groups

    def _group(self, request: Request, tokens: list[int]) -> GroupResult:
        return GroupResult(
            prompt_id=request.prompt_id,
            samples=tuple(sample(request.prompt_id, i, token) for i, token in enumerate(tokens)),
            failures=tuple(
                Failure(
                    prompt_id=request.prompt_id,
                    sample_index=i,
                    kind="connection",
                    message="server gone",
                    num_attempts=1,
                )
                for i in range(len(tokens), self.n)
            ),
        )

    async def sample(self, request: Request, sampling: SamplingConfig) -> GroupResult:
        self.requests.append(request)
        token = 2 if len(request.prompt_ids) == 2 else 3
        return GroupResult(prompt_id=request.prompt_id, samples=(sample(request.prompt_id, 0, token),))

    async def generate_first(
        self, requests: list[Any], sampling: SamplingConfig, *, num_groups: int, keep_rest: bool, on_group: Any
    ) -> FirstGroups:
        """The first ones are complete; each of the others has one token more than it had."""
        self.requests += requests
        groups = [self._group(request, [2] * self.n) for request in requests[:num_groups]]
        for group in groups:
            on_group(group)
        rest = [r if isinstance(r, PartialGroup) else fresh_group(r, self.n) for r in requests[num_groups:]]
        grown = [replace(g, samples=tuple(self._grown(s) for s in g.samples)) for g in rest]
        return FirstGroups(groups=groups, rest=grown if keep_rest else [])

    def _grown(self, sample: PartialSample) -> PartialSample:
        spans = (*sample.version_spans, VersionSpan(self.version, 1))
        return replace(sample, response_ids=[*sample.response_ids, 7], version_spans=spans)

    async def fetch_metrics(self) -> dict[str, float]:
        return {"client/response_tokens": float(len(self.requests)), "client/num_retries": 0.0}


def sample(prompt_id: str, index: int, token: int) -> Sample:
    return Sample(
        prompt_id=prompt_id,
        sample_index=index,
        response_ids=[token],
        log_probs=[-0.5 * token],
        finish_reason="stop",
        policy_version=3,
        last_policy_version=3,
    )


def phase(client: Any, scorer: Scorer, seed: int = 1, **options: Any) -> RolloutPhase:
    return RolloutPhase(client, Tokenizer(), scorer=scorer, seed=seed, **options)
