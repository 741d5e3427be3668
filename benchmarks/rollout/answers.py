"""CPU time of answers that arrive together at the end of a generation: `python -m benchmarks.rollout.answers`.

The front end of a server makes them, the client reads them; both without HTTP. "Lists" have a JSON number for each id
and log-prob (`plinth_ids_only: 1` in the request), "packed" answers two base64 texts (2, as the client asks). Needs
vLLM, for the CPU or for GPUs.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
from fastapi.responses import JSONResponse
from vllm import SamplingParams
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists

from rollout_vllm import SamplingConfig
from rollout_vllm.client.protocol import Choice, completion_body, parse_completion
from rollout_vllm.servers.fast.buffering import PACKED, buffer_in_front_end
from rollout_vllm.servers.patch import BUFFERING, IDS_ONLY

VOCABULARY = 151_936


def result(args: argparse.Namespace, chooser: random.Random) -> Any:
    """vLLM's `RequestOutput` of a marked request with `--n` choices."""
    prompt = [chooser.randrange(VOCABULARY) for _ in range(args.prompt_tokens)]
    params = SamplingParams(logprobs=0, extra_args={IDS_ONLY: 1}, output_kind=RequestOutputKind.FINAL_ONLY)
    request: Any = SimpleNamespace(
        request_id="cmpl-r-1",
        external_req_id="cmpl-r",
        sampling_params=params,
        pooling_params=None,
        resumable=False,
        prompt_token_ids=prompt,
        prompt_embeds=None,
        lora_request=None,
        arrival_time=0.0,
    )
    whole: Any = None
    for index in range(args.n):
        processor = OutputProcessor(None, log_stats=False)
        processor.add_request(request, None)
        state = processor.request_states["cmpl-r-1"]
        values = numpy.array([-chooser.expovariate(0.5) for _ in range(args.tokens)], numpy.float32)
        spans = numpy.array([[1, args.tokens]])
        sent: Any = SimpleNamespace(new_logprobs=LogprobsLists(spans, values[:, None], numpy.empty(0, numpy.int32)))
        assert state.detokenizer is not None
        assert state.logprobs_processor is not None
        state.detokenizer.update([chooser.randrange(VOCABULARY) for _ in range(args.tokens)], False)
        state.logprobs_processor.update_from_output(sent)
        made: Any = state.make_request_output([], None, "length", None)
        made.outputs[0].index = index
        whole = whole or made
        if whole is not made:
            whole.outputs += made.outputs
    return whole


@dataclass(frozen=True, kw_only=True)
class Measured:
    """CPU milliseconds of the front end and of the client, bytes of an answer, and what the client reads."""

    front_end: float
    client: float
    num_bytes: int
    read: list[list[Choice]]


def measure(results: list[Any], args: argparse.Namespace, mark: int) -> Measured:
    """One round of answers to a request with this mark."""
    sampling = SamplingConfig(n=args.n, max_tokens=args.tokens)
    body = completion_body([1], sampling, model="policy", seed=0) | {"vllm_xargs": {IDS_ONLY: mark}}
    request = CompletionRequest(**body)
    serving: Any = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    serving.enable_prompt_tokens_details = serving.enable_per_request_metrics = False
    serving.system_fingerprint = None
    started = time.process_time()
    answers = []
    for each in results:
        response = serving.request_output_to_completion_response(
            [each], request, "cmpl-r", 0, "policy", None, SimpleNamespace()
        )
        answers.append(bytes(JSONResponse(content=response.model_dump()).body))  # as vLLM's route does
    made = time.process_time()
    read = [parse_completion(json.loads(answer), args.n) for answer in answers]
    ended = time.process_time()
    return Measured(
        front_end=1000 * (made - started), client=1000 * (ended - made), num_bytes=len(answers[0]), read=read
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="answers of a server")
    parser.add_argument("--n", type=int, default=4, help="samples of a request")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=297)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if not BUFFERING.check():
        raise SystemExit("the installed vLLM takes its own path")
    buffer_in_front_end(BUFFERING.replace, IDS_ONLY)
    chooser = random.Random(0)
    results = [result(args, chooser) for _ in range(args.requests)]
    forms = {"lists": 1, "packed": PACKED}
    rounds = [{name: measure(results, args, mark) for name, mark in forms.items()} for _ in range(args.rounds)]
    assert all(measured["lists"].read == measured["packed"].read for measured in rounds)
    print(f"{args.requests} answers with {args.n} x {args.tokens} tokens; CPU milliseconds, median (range)")
    print("| | front end | client | bytes of an answer |\n| --- | --- | --- | --- |")
    for name in forms:
        sides = [[measured[name].front_end for measured in rounds], [measured[name].client for measured in rounds]]
        cells = [f"{statistics.median(side):.0f} ({min(side):.0f}-{max(side):.0f})" for side in sides]
        print(f"| {name} | {' | '.join(cells)} | {rounds[0][name].num_bytes:,} |")


if __name__ == "__main__":
    main()
