"""Routed experts of CPU servers: every computed token once, with every setting of the server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from rollout_vllm_helpers import AppThread

from plinth_testing import raises, random_model, tiny_config, write_word_tokenizer
from rollout_vllm import (
    Group,
    Request,
    RolloutClient,
    RolloutConfig,
    RolloutConfigError,
    SamplingConfig,
    ServerGroup,
    check_running,
)
from rollout_vllm.servers.command import server_arguments, server_environment
from rollout_vllm.servers.fast.buffering import _is_plain_step
from rollout_vllm.servers.routes import RouteBuffer


@given(st.data())
def test_every_row_is_taken_once_whatever_is_computed_again(data: st.DataObject) -> None:
    """A preempted request begins again at any earlier token; its rows then differ, and the first ones stay."""
    buffer, place, taken, expected = RouteBuffer(), 0, list[int](), dict[int, int]()
    for step in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.sampled_from((place, place, 0)))
        count = data.draw(st.integers(0, 4))
        rows = np.arange(place, place + count)[:, None, None] + 100 * step
        for row in range(place, place + count):
            expected.setdefault(row, row + 100 * step)
        buffer.add({"a": (place, rows), "gone": (0, rows)}, {"a"})
        place += count
        if data.draw(st.booleans()):
            new = buffer.take("a")
            taken += [] if new is None else new.flatten().tolist()
    rest = buffer.take("a")
    taken += [] if rest is None else rest.flatten().tolist()
    assert taken == [value for row, value in sorted(expected.items())]
    assert buffer.take("gone") is None
    buffer.add({}, ())
    assert buffer.take("a") is None


@pytest.mark.parametrize("name", ["routed_experts", "aux_output_connector_output"])
def test_vllm_makes_the_outputs_of_steps_with_routes(name: str) -> None:
    """Tokens that are only noted have none. The names are those of 0.26 and routes.py, and of 0.32."""
    scheduled: Any = SimpleNamespace(scheduled_spec_decode_tokens={})
    plain = {"sampled_token_ids": [[1]], "num_nans_in_logits": None}
    steps = [SimpleNamespace(**plain, **{name: value}) for value in (None, {"a": (0, np.zeros((1, 1, 1)))})]
    assert [_is_plain_step(SimpleNamespace(), scheduled, step, None) for step in steps] == [True, False]


def test_existing_servers_without_routes_are_refused() -> None:
    async def complete(_: web.Request) -> web.Response:
        return web.json_response({"choices": [{"logprobs": {"token_logprobs": [0.0]}} | extra]})

    async def list_models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{}]})

    extra: dict[str, str] = {}
    server = AppThread(web.post("/v1/completions", complete), web.get("/v1/models", list_models))
    try:
        for log_probs in (True, False):
            config = RolloutConfig(urls=(server.url,), routes=True, log_probs=log_probs)
            with raises(RolloutConfigError, field="urls", remedy="start it with --enable-return-routed-experts"):
                check_running(config)
        extra["routed_experts"] = "base64"
        check_running(config)
    finally:
        server.close()


def test_servers_are_started_for_it() -> None:
    config = RolloutConfig(routes=True)
    gpu, cpu = (server_arguments(config, "m", port=1, device=device) for device in ("cuda", "cpu"))
    assert {"--enable-return-routed-experts", "--enable-prefix-caching"} <= set(gpu)
    assert {"--no-async-scheduling", "--no-enable-prefix-caching"} <= set(cpu)
    assert "--enable-return-routed-experts" not in [
        *cpu,
        *server_arguments(RolloutConfig(), "m", port=1, device="cuda"),
    ]
    for routes, expected in ((True, "1"), (None, None)):
        given = server_environment({}, RolloutConfig(routes=routes), device="cpu", api_key="k", num_cores=2)
        assert given.get("PLINTH_ROLLOUT_ROUTES") == expected


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A mixture whose first of three layers has no experts, and its folder."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = tiny_config("qwen3_moe", **sizes, mlp_only_layers=[0])
    folder = tmp_path_factory.mktemp("mixture")
    model = random_model(config)
    model.save_pretrained(folder)
    write_word_tokenizer(folder, 64, eos_token="w2", bos_token="w1")
    return model, folder


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="fast paths"),
        pytest.param(False, id="stock", marks=pytest.mark.thorough),
    ],
)
def client(
    request: Any, mixture: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutClient]:
    config = RolloutConfig(
        routes=True,
        dtype="float32",
        max_model_len=200,
        max_num_seqs=6,
        kv_cache_gib=0.01,  # so little that requests are preempted
        cpu_threads=1,
        control_routes=True,
        fast_paths=request.param,
    )
    with ServerGroup.launch(mixture[1], config, log_dir=tmp_path_factory.mktemp("logs")) as servers:
        servers.wait_ready()
        with RolloutClient(servers.endpoints, config) as made:
            yield made


def own_routes(model: Any, token_ids: Any) -> dict[int, np.ndarray]:
    """Experts of each token by layer, sorted, of transformers' own forward."""
    routers = {i: layer.mlp.gate for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}
    chosen: dict[int, np.ndarray] = {}
    hooks = [
        router.register_forward_hook(lambda _, __, output, i=i: chosen.update({i: np.sort(output[2].numpy(), -1)}))
        for i, router in routers.items()
    ]
    with torch.no_grad():
        model(torch.tensor(token_ids, dtype=torch.int64)[None])
    for hook in hooks:
        hook.remove()
    return chosen


@pytest.mark.slow
@pytest.mark.long
def test_a_real_server_returns_the_experts_that_transformers_chooses(
    client: RolloutClient, mixture: tuple[Any, Path]
) -> None:
    """For prompts and responses, of requests that are interrupted and resumed as well."""
    requests = [Request(prompt_id=str(n), prompt_ids=range(3, 3 + n), seed=n) for n in (1, 17, 40)]
    sampling = SamplingConfig(n=3, max_tokens=90, ignore_eos=True)

    async def interrupted() -> list[Group]:
        task = asyncio.ensure_future(client.generate(requests, sampling))
        for _ in range(3):
            await asyncio.sleep(0.4)
            await client.pause()
            client.resume()
        return await task

    groups = [*client.generate_blocking(requests, sampling), *client.run(interrupted())]
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == 18
    compared = different = 0
    for sample in samples:
        assert sample.routes is not None
        assert sample.routes.dtype == np.uint8
        assert sample.routes.shape == (sample.token_ids.size - 1, 3, 2)
        expected = own_routes(mixture[0], sample.token_ids)
        assert sorted(expected) == [1, 2]
        for layer, chosen in expected.items():
            compared += len(sample.routes)
            different += int((np.sort(sample.routes[:, layer], -1) != chosen[:-1]).any(-1).sum())
    assert different <= compared // 1000, "near ties alone"
