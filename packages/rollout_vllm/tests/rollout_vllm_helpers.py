"""Test helpers: a tiny model, reference log-probs, settings, requests, and a proxy that injects faults."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

import rollout_vllm
from plinth_base.fence import Patch, Replace
from plinth_testing import random_model, tiny_config, write_word_tokenizer
from rollout_vllm import Endpoint, Group, Request, RolloutConfig, Sample, request_seed
from rollout_vllm.client.transport import LoopThread

EOS_ID = 1
FAST_PATHS = Path(rollout_vllm.__file__).parent / "servers" / "fast"
"""Folder of modules with kernels."""


def build_model(model: Path, adapter: Path) -> None:
    """Write a tiny Qwen3 with a tokenizer to `model`, and a LoRA adapter for it to `adapter`."""
    import torch
    from peft import LoraConfig, get_peft_model

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.08}
    base = random_model(tiny_config(**sizes, bos_token_id=None, eos_token_id=EOS_ID, pad_token_id=0))
    base.save_pretrained(model)
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    write_word_tokenizer(model, eos_token="w1", pad_token="w0", unk_token="w2", chat_template=template)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapted.save_pretrained(adapter)


def reference_log_probs(
    cases: Sequence[tuple[Sequence[int], list[int]]], *, temperature: float, model: Path, adapters: Sequence[Path] = ()
) -> list[list[list[float]]]:
    """For every (prompt, response): the response's log-probs of the model, and of the model with each adapter."""
    import torch
    from transformers import Qwen3ForCausalLM

    def load(adapter: Path | None) -> Any:
        loaded: Any = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
        if adapter is None:
            return loaded
        from peft import PeftModel

        return PeftModel.from_pretrained(loaded, adapter)

    @torch.no_grad()
    def log_probs(of: Any, prompt: Sequence[int], response: list[int]) -> list[float]:
        logits = of(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()  # type: ignore[no-any-return]

    models = [load(adapter) for adapter in (None, *adapters)]
    return [[log_probs(one, *case) for one in models] for case in cases]


@contextmanager
def restoring() -> Iterator[Callable[[Patch], Replace]]:
    """`replace` of a patch, whose replacements end with the block."""
    with ExitStack() as stack:

        def of(patch: Patch) -> Replace:
            def replace(target: Any, **values: Any) -> Callable[[], None]:
                return stack.callback(patch.replace(target, **values))

            return replace

        yield of


def is_running(pid: int | str) -> bool:
    """True if a process exists and is no zombie that nobody reaps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_script(script: str, *arguments: object, stdin: str = "") -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, input=stdin, check=True, timeout=400, capture_output=True, text=True).stdout


def config_for_tests(**changes: Any) -> RolloutConfig:
    settings: dict[str, Any] = {"max_model_len": 256, "kv_cache_gib": 0.05, "dtype": "float32", "stop_grace_s": 3.0}
    return RolloutConfig(**(settings | {"cpu_threads": 1} | changes))


def make_requests(count: int, *, length: int = 12, step: int = 0) -> list[Request]:
    chooser = random.Random(step)
    return [
        Request(
            prompt_id=f"p{i}",
            prompt_ids=[chooser.randrange(3, 64) for _ in range(length)],
            seed=request_seed(7, step, f"p{i}"),
        )
        for i in range(count)
    ]


class ByteTokenizer:
    """Token i is byte i; 256 ends a turn. No chat template."""

    chat_template: str | None = None
    all_special_ids = (256,)
    name_or_path = "bytes"

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode()


def group_of_one(request: Request, ids: list[int], *, log_prob: float = -1.0, version: int = 0) -> Group:
    """The answer of a client with one sample that ended."""
    sample = Sample(
        prompt_id=request.prompt_id,
        sample_index=0,
        response_ids=ids,
        log_probs=[log_prob] * len(ids),
        finish_reason="stop",
        last_policy_version=version,
    )
    return Group(request=request, samples=(sample,))


def assert_complete(requests: list[Request], groups: list[Group], n: int) -> None:
    """Every sample index occurs exactly once."""
    assert [g.prompt_id for g in groups] == [r.prompt_id for r in requests]
    for group in groups:
        indices = [s.sample_index for s in group.samples] + [f.sample_index for f in group.failures]
        assert sorted(indices) == list(range(n))


class AppThread:
    """An aiohttp application in a thread. url: its address."""

    def __init__(self, *routes: web.AbstractRouteDef) -> None:
        self._thread = LoopThread("application of a test")
        self._runner = self._thread.run(self._start(routes))
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _start(self, routes: Sequence[web.AbstractRouteDef]) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(routes)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    def close(self) -> None:
        self._thread.run(self._runner.cleanup())
        self._thread.settle(cancel=True)
        self._thread.close()


class FaultyProxy(AppThread):
    """A proxy of a real server that injects the faults in `plan`, one per completion request, then forwards all.

    Faults: "pass" (forward), "drop" (close without a response), "cut" (half a response), "garbage" (200 without JSON),
    "missing" (one choice too few), "raw" (log-probs of the raw logits), "hang" (never answer), or an HTTP status.
    """

    def __init__(self, upstream: Endpoint) -> None:
        super().__init__(web.route("*", "/{path:.*}", self._handle))
        self.upstream = upstream
        self.endpoint = Endpoint(self.url, upstream.api_key, upstream.model)
        self.plan: deque[str | int] = deque()
        self.num_requests = 0
        self.retry_after: str | None = None
        self.without_control_routes = False

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault: str | int = "pass"
        if request.path == "/v1/completions":
            self.num_requests += 1
            fault = self.plan.popleft() if self.plan else "pass"
        if self.without_control_routes and not request.path.startswith("/v1/"):
            return web.json_response({"detail": "Not Found"}, status=404)
        assert request.transport is not None
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "drop":
            request.transport.abort()
            return web.Response()
        if isinstance(fault, int):
            headers = {"Retry-After": self.retry_after} if self.retry_after else {}
            return web.json_response({"error": {"message": "fault"}}, status=fault, headers=headers)
        if fault == "garbage":
            return web.Response(text="<html>not json</html>")
        headers = {k: v for k, v in request.headers.items() if k in ("Authorization", "Content-Type")}
        url = self.upstream.url + request.path_qs
        async with aiohttp.request(request.method, url, data=await request.read(), headers=headers) as answer:
            raw = await answer.read()
            if fault == "raw":
                raw = re.sub(rb'"token_logprobs":\[[^],]*', b'"token_logprobs":[-0.25', raw)
            if fault == "missing":
                raw = raw.replace(b'"index":1,', b'"index":0,', 1)
            if fault == "cut":
                response = web.StreamResponse(headers={"Content-Length": str(len(raw))})
                await response.prepare(request)
                await response.write(raw[: len(raw) // 2])
                request.transport.abort()
                return response
            return web.Response(body=raw, status=answer.status, content_type=answer.content_type)
