"""Rollouts from a server with OpenAI's API: `rollout_vllm` beside the `openai` client.

    python examples/openai_server_rollout.py
    VLLM_API_KEY=... python examples/openai_server_rollout.py --url http://127.0.0.1:8000 --model FOLDER

What it buys: the token ids that were sampled, each with the log-prob that it was sampled with, and one answer for
every sample: a sample, or a failure with its reason. Text has to be tokenized again, which gives other tokens than the
sampled ones, so that the log-probs no longer belong to them. The script sends the same prompts both ways and scores
every response with the model, then adds one prompt that is too long, and then cuts the connections of every eighth
prompt three times.

Measured with this command on two busy CPU cores, 64 prompts x 4 responses of 32 tokens, temperature 0.8:

* tokenized again, 187 of 256 responses are other tokens than the sampled ones; of rollout_vllm's responses none, and
  their log-probs are the model's to 3.8e-6; it takes 1.5 s, the `openai` client 2.9 s;
* a prompt that is too long makes `asyncio.gather` raise, which loses the other 256 responses; rollout_vllm returns
  them, and four failures "too_long";
* connections cut three times: the `openai` client's two retries (its default) lose 8 of 64 prompts, rollout_vllm's
  five none.

With `extra_body={"return_token_ids": True}` vLLM returns the token ids to the `openai` client, too.

The server must return token ids: vLLM does on request (`return_token_ids`). Failures name this if it does not. Start it
with `--logprobs-mode processed_logprobs`, else its log-probs are those before the temperature; `check_running` says so.
The client has limits for requests in flight, retries and time: `RolloutConfig`.
"""

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import openai
import torch
from aiohttp import web
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from plinth_testing import free_port, random_model, tiny_config
from rollout_vllm import Endpoint, Request, RolloutClient, RolloutConfig, SamplingConfig, ServerGroup, check_running

DOCS = Path(__file__).resolve().parents[1] / "docs"
SAMPLING = SamplingConfig(n=4, max_tokens=32, temperature=0.8, ignore_eos=True)


class Response(NamedTuple):
    """One response: token ids and their log-probs, as a trainer would use them."""

    prompt: str
    ids: list[int]
    log_probs: list[float]


class Rollout(NamedTuple):
    """Responses to all prompts."""

    responses: list[Response]
    failures: list[str]
    seconds: float


async def with_openai(endpoint: Endpoint, tokenizer: Any, prompts: Sequence[str]) -> Rollout:
    """By hand: text in, text out. Responses are tokenized again."""
    responses, failures, start = [], list[str](), time.perf_counter()
    async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.api_key or "-") as client:
        model = (await client.models.list()).data[0].id

        async def one(index: int, prompt: str) -> list[Response]:
            completion = await client.completions.create(
                model=model,
                prompt=prompt,
                n=SAMPLING.n,
                max_tokens=SAMPLING.max_tokens,
                temperature=SAMPLING.temperature,
                seed=100 * index,
                logprobs=0,
                extra_body={"ignore_eos": True},
            )
            return [
                Response(prompt, tokenizer.encode(choice.text, add_special_tokens=False), log_probs_of(choice))
                for choice in completion.choices
            ]

        # Without return_exceptions the first failure would lose all responses.
        answers = await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            failures.append(f"{type(answer).__name__}: {answer}")
        else:
            responses += answer
    return Rollout(responses, failures, time.perf_counter() - start)


def log_probs_of(choice: Any) -> list[float]:
    log_probs: list[float] = choice.logprobs.token_logprobs
    return log_probs


async def with_rollout_client(endpoint: Endpoint, tokenizer: Any, prompts: Sequence[str]) -> Rollout:
    """The same with rollout_vllm: token ids in, token ids and log-probs out."""
    start = time.perf_counter()
    client = RolloutClient([endpoint])
    requests = [
        Request(prompt_id=prompt, prompt_ids=tokenizer.encode(prompt), seed=100 * i) for i, prompt in enumerate(prompts)
    ]
    groups = await client.generate(requests, SAMPLING)
    await client.aclose()
    samples = [sample for group in groups for sample in group.samples]
    failures = [f"{failure.kind}: {failure.message}" for group in groups for failure in group.failures]
    responses = [
        Response(sample.prompt_id, sample.response_ids.tolist(), sample.log_probs.tolist())
        for sample in samples
        if sample.log_probs is not None
    ]
    return Rollout(responses, failures, time.perf_counter() - start)


@torch.no_grad()
def count_wrong(model: Any, tokenizer: Any, responses: Sequence[Response]) -> tuple[int, float]:
    """Responses whose log-probs are not those of their ids, and the largest difference where the numbers agree."""
    num_wrong, largest = 0, 0.0
    for prompt, ids, log_probs in responses:
        prompt_ids = tokenizer.encode(prompt)
        logits_TV = model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
        own_T = (logits_TV / SAMPLING.temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        same_length = len(ids) == len(log_probs)
        difference = float((own_T - torch.tensor(log_probs)).abs().max()) if same_length else float("inf")
        if difference > 1e-3:
            num_wrong += 1
        else:
            largest = max(largest, difference)
    return num_wrong, largest


@contextlib.asynccontextmanager
async def cutting_connections(endpoint: Endpoint, times: int) -> AsyncIterator[Endpoint]:
    """A proxy that drops the connections of every eighth distinct request, `times` times each."""
    seen: Counter[bytes] = Counter()

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen[body] += 1
        is_cut = request.method == "POST" and list(seen).index(body) % 8 == 0 and seen[body] <= times
        if is_cut:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()  # to nobody
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        async with session.request(request.method, request.path, data=body, headers=headers) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner, port = web.AppRunner(app), free_port()
    async with aiohttp.ClientSession(endpoint.url, connector=aiohttp.TCPConnector(force_close=True)) as session:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield Endpoint(f"http://127.0.0.1:{port}", endpoint.api_key, endpoint.model)
        finally:
            await runner.cleanup()


class Row(NamedTuple):
    """One way in one situation."""

    case: str
    way: str
    num_responses: int
    num_wrong: int
    largest: float
    failures: list[str]
    seconds: float


async def compare(endpoint: Endpoint, folder: Path, num_prompts: int) -> list[Row]:
    """All rows. The model in `folder` is the one that the server serves, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lines = [line for line in (DOCS / "algorithms.md").read_text().splitlines() if len(line) > 60]
    prompts = [line[:60] for line in dict.fromkeys(lines)][:num_prompts]
    assert len(prompts) == num_prompts, f"--prompts: at most {len(prompts)}"
    rows = []

    async def run(case: str, server: Endpoint, cases: Sequence[str]) -> None:
        for way, send in {"openai": with_openai, "rollout_vllm": with_rollout_client}.items():
            responses, failures, seconds = await send(server, tokenizer, cases)
            num_wrong, largest = count_wrong(model, tokenizer, responses)
            rows.append(Row(case, way, len(responses), num_wrong, largest, failures, seconds))

    await with_rollout_client(endpoint, tokenizer, prompts)  # warm-up
    await run("as is", endpoint, prompts)
    await run("one prompt too long", endpoint, [*prompts, " ".join(prompts * 9)])
    async with cutting_connections(endpoint, times=3) as flaky:
        await run("connections cut", flaky, prompts)
    return rows


def show(row: Row) -> None:
    print(
        f"{row.case:20s} {row.way:13s} {row.num_responses:4d} responses in {row.seconds:.2f} s, {row.num_wrong} with "
        f"log-probs of other tokens, others equal to {row.largest:.1e}; {len(row.failures)} failures"
    )
    for failure in dict.fromkeys(row.failures):
        print(f"{'':35s}{failure[:150]}")


def write_model(folder: Path, num_steps: int = 100) -> None:
    """A Qwen3 with a byte-level tokenizer of 1,024 tokens, trained on this repository's documentation for seconds."""
    texts = [path.read_text() for path in sorted(DOCS.glob("*.md"))]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=1024, special_tokens=["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(folder)
    model = random_model(tiny_config(vocab_size=1024, hidden_size=128, initializer_range=0.02, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids_N = torch.tensor(tokenizer.encode("\n".join(texts)))
    for _ in range(num_steps):
        starts_B = torch.randint(len(ids_N) - 64, (16, 1))
        ids_BL = ids_N[starts_B + torch.arange(64)]
        model(input_ids=ids_BL, labels=ids_BL).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


@contextlib.contextmanager
def running_server(folder: Path, logs: Path) -> Iterator[Endpoint]:
    """A vLLM server on the CPU."""
    config = RolloutConfig(max_model_len=256, dtype="float32", cpu_threads=1, kv_cache_gib=0.1)
    with ServerGroup.launch(folder, config, log_dir=logs) as servers:
        servers.wait_ready()
        yield servers.endpoints[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="an existing server, in float32; its key is read from VLLM_API_KEY")
    parser.add_argument("--model", type=Path, help="the folder that it serves, which gives tokenizer and log-probs")
    parser.add_argument("--prompts", type=int, default=64)
    options = parser.parse_args()
    if options.url and not options.model:
        parser.error("--url needs --model, the folder that this server serves")
    with contextlib.ExitStack() as stack:
        if options.url:
            endpoint, folder = Endpoint(options.url, os.environ.get("VLLM_API_KEY")), options.model
            check_running(RolloutConfig(urls=(options.url,), api_key=endpoint.api_key))
        else:
            name = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder = name / "model"
            write_model(folder)
            endpoint = stack.enter_context(running_server(folder, name))
        for row in asyncio.run(compare(endpoint, folder, options.prompts)):
            show(row)


if __name__ == "__main__":
    main()
