"""Buffered tokens: what the front end receives in all is what stock vLLM sends, for any order of events."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from rollout_vllm.servers.fast.buffering import INTERVAL, UNKNOWN_VERSION, TokenBuffer, is_buffered
from rollout_vllm.servers.patch import IDS_ONLY

REQUESTS = ("a", "b", "stock")


Step = dict[str, tuple[int, bool]]


@st.composite
def steps(draw: st.DrawFn) -> list[Step | int]:
    """For each step and request that takes part: number of tokens, and whether it is the request's last step.

    Between steps, new weights are published: a policy version.
    """
    made, ended = list[Step | int](), set[str]()
    for _ in range(draw(st.integers(1, 3 * INTERVAL))):
        if not draw(st.integers(0, 9)):
            made.append(draw(st.integers(0, 3)))
        rows = {}
        for request in REQUESTS:
            if request not in ended and draw(st.integers(0, 9)):
                last = not draw(st.integers(0, 99))
                rows[request] = (draw(st.sampled_from((1, 1, 1, 0, 3))), last)
                ended |= {request} if last else set()
        made.append(rows)
    return made


def rows_of(tokens: list[int]) -> Any:
    """Routed experts: one row a token, which has its id; None without tokens."""
    return numpy.array(tokens, numpy.uint8)[:, None, None] if tokens else None


def outputs_of(rows: dict[str, tuple[int, bool]], first: set[str], speculative: bool) -> tuple[list[Any], Any]:
    """vLLM's outputs of a step whose tokens are 0, 1, ... and have log-probs -0, -1/8, ..."""
    starts = numpy.cumsum([0, *(max(1, count) for count, _ in rows.values())]).tolist()
    size = starts[-1] if speculative else len(rows)
    ids = numpy.arange(size, dtype=numpy.int32)[:, None]
    log_probs = LogprobsLists(ids, -ids.astype(numpy.float32) / 8, ids[:, 0], starts if speculative else None)
    outputs = []
    for row, (request, (count, last)) in enumerate(rows.items()):
        begin = starts[row] if speculative else row
        count = count if speculative else min(count, 1)
        output = EngineCoreOutput(request, list(range(begin, begin + count)), new_logprobs=(row, count))
        output.routed_experts = rows_of(output.new_token_ids)
        output.finish_reason = FinishReason.LENGTH if last else None
        if request not in first:
            first.add(request)
            output.prefill_stats = PrefillStats()
        outputs.append(output)
    return outputs, log_probs


@settings(deadline=None, max_examples=60)
@given(plan=steps(), speculative=st.booleans(), with_log_probs=st.booleans())
def test_nothing_is_lost_repeated_or_reordered(plan: list[Any], speculative: bool, with_log_probs: bool) -> None:
    buffer, first = TokenBuffer(), set[str]()
    intervals = {"a": INTERVAL, "b": 1}  # with stop strings
    for request, interval in intervals.items():
        buffer.open(request, 3, interval=interval)
    sent: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    expected: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    versions_sent: dict[str, list[int]] = defaultdict(list)
    versions: dict[str, list[int]] = defaultdict(list)
    version = UNKNOWN_VERSION
    messages: dict[str, int] = defaultdict(int)

    def receive(output: Any) -> None:
        ids, values = sent[output.request_id]
        ids += output.new_token_ids
        assert numpy.array_equal(output.routed_experts, rows_of(output.new_token_ids))
        values += [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
        if output.request_id != "stock":
            spans = output.new_logprobs.logprob_token_ids.tolist()
            assert all(count > 0 for _, count in spans)
            versions_sent[output.request_id] += [version for version, count in spans for _ in range(count)]
        messages[output.request_id] += 1

    for rows in plan:
        if isinstance(rows, int):
            version = rows
            buffer.publish(version)
            continue
        outputs, log_probs = outputs_of(rows, first, speculative)
        for output in outputs:
            expected[output.request_id][0].extend(output.new_token_ids)
            versions[output.request_id] += [version] * len(output.new_token_ids)
            values = [-token / 8 for token in output.new_token_ids] if with_log_probs else []
            expected[output.request_id][1].extend(values)
            output.new_logprobs = output.new_logprobs if with_log_probs else None
        column = log_probs.logprobs[:, 0].tolist() if with_log_probs else None
        for output in buffer.filter(outputs, log_probs if with_log_probs else None, column):
            receive(output)
    for request in ("a", "b"):
        if buffer.client_of(request) is not None:  # did not end: aborted
            assert buffer.client_of(request) == 3
            rest = buffer.close(request)
            if rest is not None:
                assert 0 < len(rest.new_token_ids) < intervals[request]
                receive(rest)
        assert messages[request] <= 3 + len(sent[request][0]) // intervals[request]
        assert buffer.client_of(request) is None
    for request in REQUESTS:
        assert sent[request] == expected[request]
    assert all(versions_sent[request] == versions[request] for request in ("a", "b"))


@pytest.mark.parametrize(
    "changes",
    [
        {"extra_args": None},
        {"output_kind": RequestOutputKind.DELTA},
        {"logprobs": 2},
        {"prompt_logprobs": 0},
        {"logprob_token_ids": [3]},
    ],
    ids=str,
)
def test_requests_that_need_more_than_ids_are_not_buffered(changes: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"extra_args": {IDS_ONLY: 1}, "logprobs": 0, "output_kind": RequestOutputKind.FINAL_ONLY}

    def request(name: str = "cmpl-1-0-ab", resumable: bool = False, **changes: Any) -> Any:
        return SimpleNamespace(request_id=name, sampling_params=SamplingParams(**plain | changes), resumable=resumable)

    assert is_buffered(request(), IDS_ONLY)
    assert is_buffered(request(logprobs=None), IDS_ONLY)
    assert is_buffered(request(stop="x"), IDS_ONLY)
    assert is_buffered(request("13_cmpl-1-0-ab"), IDS_ONLY)  # one of n
    assert not is_buffered(request("chatcmpl-1-0-ab"), IDS_ONLY)
    assert not is_buffered(request(resumable=True), IDS_ONLY)
    assert not is_buffered(request(**changes), IDS_ONLY)
    assert not is_buffered(SimpleNamespace(sampling_params=None), IDS_ONLY)
