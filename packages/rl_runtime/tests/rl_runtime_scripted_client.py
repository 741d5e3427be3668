"""A client that answers with given tokens, for tests of the rollout phase without servers."""

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

from rl_runtime_client_loops import OwnLoop

from rl_runtime.rollout.phase import RolloutPhase
from rl_runtime.rollout.scoring import Scorer
from rollout_vllm import Failure, Group, Request, Sample, SamplingConfig, VersionSpan


class Tokenizer:
    """A token of a prompt is a letter; a response is the number of its first token."""

    name_or_path, chat_template, all_special_ids = "letters", None, ()

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return f"#### {ids[0]}" if len(ids) else ""


@dataclass
class ScriptedClient(OwnLoop):
    """Answers with the response tokens it was given, one prompt's after the other's; missing samples are failures."""

    responses: list[list[int]]
    n: int
    requests: list[Any] = field(default_factory=list)
    version: int = 0

    async def generate(self, requests: list[Request], sampling: SamplingConfig, *, on_group: Any) -> list[Group]:
        self.requests += requests
        groups = [self._group(request, ids) for request, ids in zip(requests, self.responses, strict=True)]
        for group in reversed(groups):  # the order of completion is not that of the prompts
            answer = on_group(group)
            if inspect.isawaitable(answer):
                await answer
        return groups

    def _group(self, request: Request, tokens: list[int]) -> Group:
        return Group(
            request=request,
            samples=tuple(sample(request, i, token) for i, token in enumerate(tokens)),
            failures=tuple(failure(request, i) for i in range(len(tokens), self.n)),
        )

    async def sample(self, request: Request, sampling: SamplingConfig) -> Group:
        self.requests.append(request)
        token = 2 if len(request.prompt_ids) == 2 else 3
        return Group(request=request, samples=(sample(request, 0, token),))

    async def generate_first(
        self, requests: list[Any], sampling: SamplingConfig, *, num_groups: int, keep_rest: bool, on_group: Any
    ) -> tuple[list[Group], list[Group]]:
        """The first ones are complete; each of the others has one token more than it had."""
        self.requests += requests
        whole = [one.request if isinstance(one, Group) else one for one in requests[:num_groups]]
        groups = [self._group(request, [2] * self.n) for request in whole]
        for group in groups:
            on_group(group)
        rest = [r if isinstance(r, Group) else Group.fresh(r, self.n) for r in requests[num_groups:]]
        grown = [replace(g, samples=tuple(map(self._grown, g.samples))) for g in rest]
        return groups, grown if keep_rest else []

    def _grown(self, sample: Sample) -> Sample:
        spans = (*sample.version_spans, VersionSpan(self.version, 1))
        ids, log_probs = [*sample.response_ids, 7], [*(sample.log_probs if sample.log_probs is not None else ()), -1.0]
        return replace(sample, response_ids=ids, log_probs=log_probs, version_spans=spans)

    async def fetch_metrics(self) -> dict[str, float]:
        return {"client/response_tokens": float(len(self.requests)), "client/num_retries": 0.0}


def failure(request: Request, index: int) -> Failure:
    return Failure(
        prompt_id=request.prompt_id, sample_index=index, kind="connection", message="server gone", num_attempts=1
    )


def sample(request: Request, index: int, token: int) -> Sample:
    fresh = Group.fresh(request, index + 1).samples[index]
    return replace(fresh, response_ids=[token], log_probs=[-0.5 * token], finish_reason="stop", last_policy_version=3)


def phase(client: Any, scorer: Scorer, seed: int = 1, **options: Any) -> RolloutPhase:
    return RolloutPhase(client, Tokenizer(), scorer=scorer, seed=seed, **options)
