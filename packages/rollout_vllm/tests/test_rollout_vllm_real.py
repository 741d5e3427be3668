"""Generation, checks and control routes with real vLLM servers on the CPU."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from rollout_vllm_helpers import (
    EOS_ID,
    FaultyProxy,
    assert_complete,
    config_for_tests,
    make_requests,
    reference_log_probs,
)

from plinth_base.endpoint import call
from plinth_testing import raises
from rollout_vllm import (
    ControlError,
    Endpoint,
    Episode,
    Group,
    ModelFolderError,
    Request,
    RequestTooLongError,
    RolloutClient,
    RolloutConfig,
    RolloutConfigError,
    SamplingConfig,
    ServerGroup,
    ServerStartError,
    check_running,
    request_seed,
    run_episodes,
)
from rollout_vllm.servers import control
from rollout_vllm.servers.command import server_environment

pytestmark = pytest.mark.slow


def test_requests_for_token_strings_get_them(pair: ServerGroup, model_folder: Path) -> None:
    vocabulary = json.loads((model_folder / "tokenizer.json").read_text())["model"]["vocab"]
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 8,
        "seed": 1,
        "logprobs": 2,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    status, text = call(pair.endpoints[0], "POST", "/v1/completions", body)
    assert status == 200, text
    choice = json.loads(text)["choices"][0]
    assert [vocabulary[token] for token in choice["logprobs"]["tokens"]] == choice["token_ids"]
    assert all(len(top) in (2, 3) and set(top) <= set(vocabulary) for top in choice["logprobs"]["top_logprobs"])
    log = pair.servers[0].log_path.read_text()
    for line in ("forked engine: get_mp_context", "buffered tokens: update_from_output"):
        assert f"{line} is replaced and in use" in log


def test_groups_of_samples(client: RolloutClient) -> None:
    client.set_policy_version(3)
    requests, sampling = make_requests(24), SamplingConfig(n=4, max_tokens=10)
    order: list[str] = []
    groups = client.generate_blocking(requests, sampling, on_group=lambda g: order.append(g.prompt_id))
    assert_complete(requests, groups, 4)
    assert sorted(order) == sorted(r.prompt_id for r in requests)
    samples = [s for g in groups for s in g.samples]
    assert len(samples) == 96
    for s in samples:
        assert len(s.response_ids) == len(s.log_probs) <= 10
        assert all(v <= 0 for v in s.log_probs)
        assert (s.finish_reason == "stop") == (s.response_ids[-1] == EOS_ID)
        assert s.policy_version == s.last_policy_version == 3
    served = Counter(s.server_url for s in samples)
    assert set(served.values()) == {48}, served  # the load is balanced and groups are not split
    figures = client.metrics()
    assert figures["client/num_samples"] == 96
    assert figures["generation_tokens"] >= sum(len(s.response_ids) for s in samples)
    assert all(figures[name] >= 0 for name in ("num_running", "num_waiting", "num_preemptions", "prefix_cache_hits"))
    client.generate_blocking(requests, sampling)
    later = client.metrics()
    assert later["prefix_cache_queries"] > figures["prefix_cache_queries"]


def test_seeds_repeat_and_differ(client: RolloutClient) -> None:
    [request] = make_requests(1, step=5)
    sampling = SamplingConfig(n=4, max_tokens=16, ignore_eos=True)
    first, again = (client.generate_blocking([request], sampling)[0] for _ in range(2))
    assert [s.response_ids.tolist() for s in first.samples] == [s.response_ids.tolist() for s in again.samples]
    assert len({tuple(s.response_ids.tolist()) for s in first.samples}) == 4
    other = dataclasses.replace(request, seed=request_seed(7, 6, "p0"))
    [different] = client.generate_blocking([other], sampling)
    assert [s.response_ids.tolist() for s in first.samples] != [s.response_ids.tolist() for s in different.samples]


def test_log_probs_are_those_after_temperature(client: RolloutClient, model_folder: Path) -> None:
    requests = make_requests(6, step=8)
    groups = client.generate_blocking(requests, SamplingConfig(n=2, max_tokens=12, temperature=0.6))
    cases = [(r.prompt_ids, s.response_ids.tolist()) for r, g in zip(requests, groups, strict=True) for s in g.samples]
    ours = [s.log_probs for g in groups for s in g.samples]
    theirs = [values for [values] in reference_log_probs(cases, temperature=0.6, model=model_folder)]
    difference = max(abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))
    assert difference < 1e-3
    assert max(max(x) - min(x) for x in ours) > 1.0  # far from uniform: the test can fail


def test_stop_tokens_and_length(client: RolloutClient) -> None:
    [request] = make_requests(1, step=2)
    [free] = client.generate_blocking([request], SamplingConfig(n=1, max_tokens=30, ignore_eos=True))
    ids = free.samples[0].response_ids.tolist()
    assert len(ids) == 30
    assert free.samples[0].finish_reason == "length"
    stop = ids[9]
    [stopped] = client.generate_blocking(
        [request], SamplingConfig(n=1, max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    )
    assert stopped.samples[0].finish_reason == "stop"
    assert stopped.samples[0].response_ids.tolist() == ids[: ids.index(stop) + 1]


def test_stop_strings_end_a_response_after_their_last_token(client: RolloutClient) -> None:
    """They stay in it, with the log-prob and policy version of each token: the response is a part of the free one."""
    client.set_policy_version(6)
    requests = make_requests(6, step=3)
    free = client.generate_blocking(requests, SamplingConfig(n=2, max_tokens=40, ignore_eos=True))
    for request, group in zip(requests, free, strict=True):
        for length in (9, 30):
            texts = [f"w{token}" for token in group.samples[0].response_ids.tolist()]
            stop = f"{texts[length - 2]} {texts[length - 1]}"  # two tokens; "w1" is also the beginning of "w12"
            sampling = SamplingConfig(n=2, max_tokens=40, ignore_eos=True, stop=("<none>", stop))
            [stopped] = client.generate_blocking([request], sampling)
            for sample, whole in zip(stopped.samples, group.samples, strict=True):
                own = [f"w{token}" for token in whole.response_ids.tolist()]
                ends = [end for end in range(2, 41) if " ".join(own[end - 2 : end]).startswith(stop)]
                end = ends[0] if ends else 40
                assert sample.response_ids.tolist() == whole.response_ids.tolist()[:end]
                assert sample.log_probs == pytest.approx(whole.log_probs[:end], abs=1e-4)
                assert sample.finish_reason == ("stop" if ends else "length")
                assert sample.versions.tolist() == [6] * end
            assert len(stopped.samples[0].response_ids) <= length


@pytest.mark.parametrize("knows_limit", [True, False])
def test_request_that_is_too_long_fails_alone(pair: ServerGroup, knows_limit: bool) -> None:
    config = config_for_tests() if knows_limit else RolloutConfig()
    requests = [*make_requests(3), Request(prompt_id="long", prompt_ids=[5] * 300)]
    with RolloutClient(pair.endpoints, config) as client:
        groups = client.generate_blocking(requests, SamplingConfig(n=2, max_tokens=4))
    assert_complete(requests, groups, 2)
    assert [len(g.samples) for g in groups] == [2, 2, 2, 0]
    assert {f.kind for f in groups[3].failures} == {"too_long"}
    assert groups[3].failures[0].num_attempts == (0 if knows_limit else 1)


def test_every_route_requires_the_api_key(pair: ServerGroup) -> None:
    """Every route in the server's schema, including those that change weights, and a route that does not exist."""
    endpoint = pair.endpoints[0]
    schema = json.loads(call(endpoint, "GET", "/openapi.json")[1])["paths"]
    routes = [(method.upper(), path) for path, methods in schema.items() for method in methods]
    assert {
        ("POST", "/v1/completions"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/pause"),
        ("POST", "/abort_requests"),
        ("POST", "/init_weight_transfer_engine"),
        ("POST", "/start_weight_update"),
        ("POST", "/update_weights"),
        ("POST", "/finish_weight_update"),
        ("POST", "/collective_rpc"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("POST", "/reset_prefix_cache"),
    } <= set(routes)
    # vLLM 0.26 has neither.
    assert (("GET", "/weight_info") in routes) == (("POST", "/update_weight_version") in routes)
    routes += [("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/nothing"), ("OPTIONS", "/v1/completions")]
    before = call(endpoint, "GET", "/weight_info")[1]
    for key in (None, "wrong"):
        for method, path in routes:
            assert call(Endpoint(endpoint.url, key), method, path, {})[0] == 401, (method, path)
    assert call(endpoint, "GET", "/health")[0] == 200
    assert call(endpoint, "GET", "/weight_info")[1] == before


def test_pickle_is_not_accepted_over_http(pair: ServerGroup, tmp_path: Path) -> None:
    """Not even with the API key: the worker's methods are called by name, with JSON arguments."""
    marker = tmp_path / "run"
    payload = pickle.dumps(_Touches(str(marker)))
    for body in (
        {"method": base64.b64encode(payload).decode()},
        {"method": {"pickle": base64.b64encode(payload).decode()}},
        {"method": "check_health", "args": [base64.b64encode(payload).decode()]},
    ):
        call(pair.endpoints[0], "POST", "/collective_rpc", body, timeout_s=60)
    assert not marker.exists()
    env = server_environment(
        {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}, RolloutConfig(), device="cpu", api_key="k", num_cores=1
    )
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in env
    assert call(pair.endpoints[0], "GET", "/health")[0] == 200


class _Touches:
    """Unpickling it writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_existing_servers_by_url(pair: ServerGroup, tmp_path: Path) -> None:
    """No server is started or stopped; the name of the model is queried."""
    endpoint = pair.endpoints[1]
    config = RolloutConfig(urls=(endpoint.url + "/",), api_key=endpoint.api_key, startup_timeout_s=30)
    with ServerGroup.launch("not needed", config, log_dir=tmp_path) as group:
        group.wait_ready()
        with RolloutClient(group.endpoints, config) as client:
            [result] = client.generate_blocking(make_requests(1), SamplingConfig(n=2, max_tokens=3))
        assert result.complete
        group.check()
    pair.check()
    wrong = dataclasses.replace(config, api_key="wrong")
    with raises(ServerStartError, server_index=0, log_path=None) as caught:
        ServerGroup.launch("not needed", wrong, log_dir=tmp_path).wait_ready()
    assert "HTTP 401" in caught.value.reason


def test_check_running_finds_unusable_servers(pair: ServerGroup, proxy: FaultyProxy) -> None:
    good = RolloutConfig(urls=(proxy.endpoint.url,), api_key=proxy.endpoint.api_key, control_routes=True)
    check_running(good)
    wrong_key = "set api_key to the server's key"
    for changes, remedy in (
        ({"urls": ("http://127.0.0.1:9",)}, "start the server first"),
        ({"api_key": "wrong"}, wrong_key),
        ({"api_key": None}, wrong_key),
        ({"max_model_len": 257}, "start it with --max-model-len 257, or lower max_model_len"),
    ):
        config = dataclasses.replace(good, **changes)
        with raises(RolloutConfigError, field="urls", value=config.urls[0], remedy=remedy):
            check_running(config)
    for fault, remedy in (("raw", "start it with --logprobs-mode processed_logprobs"), (503, None), ("garbage", None)):
        proxy.plan.append(fault)
        with raises(RolloutConfigError, field="urls", remedy=remedy):
            check_running(good)
    proxy.without_control_routes = True
    check_running(dataclasses.replace(good, control_routes=False))
    with raises(RolloutConfigError, field="urls", remedy="start it with VLLM_SERVER_DEV_MODE=1, on a private network"):
        check_running(good)


def test_paused_server_counts_as_ready(pair: ServerGroup, tmp_path: Path) -> None:
    endpoint = pair.endpoints[0]
    config = RolloutConfig(urls=(endpoint.url,), api_key=endpoint.api_key, control_routes=True, startup_timeout_s=5)
    assert call(endpoint, "POST", "/sleep?level=0&mode=wait")[0] == 200
    try:
        check_running(config)
        with ServerGroup.launch("not needed", config, log_dir=tmp_path) as group:
            group.wait_ready()
    finally:
        assert call(endpoint, "POST", "/wake_up?tags=scheduling")[0] == 200


def test_generate_in_the_event_loop_of_the_caller(pair: ServerGroup) -> None:
    async def main() -> None:
        client = RolloutClient(pair.endpoints, dataclasses.replace(config_for_tests(), max_samples_in_flight=4))
        seen: list[str] = []

        async def on_group(group: Group) -> None:
            await asyncio.sleep(0)
            seen.append(group.prompt_id)
            if len(seen) == 1:
                client.set_policy_version(1)

        requests = make_requests(12)
        groups = await client.generate(requests, SamplingConfig(n=4, max_tokens=6), on_group=on_group)
        assert_complete(requests, groups, 4)
        assert len(seen) == 12
        assert {s.policy_version for g in groups for s in g.samples} == {0, 1}
        await client.aclose()

    asyncio.run(main())


# ---- multi-turn episodes --------------------------------------------------------------------------------------------
def test_episodes(client: RolloutClient) -> None:
    tool = [60, 61, 62]

    async def function(episode: Episode) -> None:
        if episode.prompt_id == "p1" and episode.sample_index == 0:
            raise KeyError("the tool broke")
        if episode.prompt_id == "p2":
            await asyncio.sleep(60)
        for _ in range(3):
            await episode.generate(max_tokens=4)
            episode.add_context(tool)
        episode.data["note"] = "kept"

    requests = make_requests(3, step=9)
    sampling = SamplingConfig(n=2, max_tokens=40, ignore_eos=True)

    async def main() -> tuple[list[Group], list[Group]]:
        both = await run_episodes(client, requests, function, sampling, episode_timeout_s=8.0)
        again = await run_episodes(client, requests[:1], function, sampling)
        await client.aclose()
        return both, again

    first, again = asyncio.run(main())
    assert [g.prompt_id for g in first] == ["p0", "p1", "p2"]
    assert [len(g.samples) for g in first] == [2, 1, 0]
    assert first[1].failures[0].kind == "rollout"
    assert "tool broke" in first[1].failures[0].message
    assert {f.kind for f in first[2].failures} == {"deadline"}
    one = first[0].samples[0]
    assert one.response_mask.tolist() == ([True] * 4 + [False] * 3) * 3
    assert one.response_ids[4:7].tolist() == tool
    assert one.log_probs[4:7].tolist() == [0.0] * 3
    assert all(v < 0 for v, m in zip(one.log_probs, one.response_mask, strict=True) if m)
    assert one.data == {"note": "kept"}
    assert one.versions.tolist() == [0] * 21
    assert again[0].samples[0].response_ids.tolist() == one.response_ids.tolist()


# ---- sleep ---------------------------------------------------------------------------------------------------------
def test_sleep_and_wake(pair: ServerGroup, client: RolloutClient) -> None:
    """A CPU worker keeps its memory, but routes, state and order are the same as on a GPU."""
    requests, sampling = make_requests(2), SamplingConfig(n=1, max_tokens=4)
    before = client.generate_blocking(requests, sampling)
    control.sleep(pair.endpoints, level=1)
    assert all(control.is_sleeping(e) for e in pair.endpoints)
    control.wake(pair.endpoints, tags=["weights"])
    control.wake(pair.endpoints, tags=["kv_cache"])
    assert not any(control.is_sleeping(e) for e in pair.endpoints)
    after = client.generate_blocking(requests, sampling)
    assert [g.samples[0].response_ids.tolist() for g in after] == [g.samples[0].response_ids.tolist() for g in before]
    wrong_key = Endpoint(pair.endpoints[1].url, "wrong")
    with pytest.raises(ControlError) as caught:
        control.sleep([wrong_key])
    assert caught.value.problems[wrong_key.url].startswith("HTTP 401")


# ---- failed starts --------------------------------------------------------------------------------------------------
def test_invalid_configuration_is_found_before_any_process_starts(model_folder: Path, tmp_path: Path) -> None:
    def launch(folder: Path = model_folder, **changes: object) -> None:
        ServerGroup.launch(folder, config_for_tests(**changes), log_dir=tmp_path / "logs")

    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model_folder / name).read_bytes())
    begin = time.process_time()
    with raises(ModelFolderError, value=str(bare)):
        launch(bare)
    for changes, error in (
        ({"kv_cache_gib": 0.0003, "max_model_len": 512}, RolloutConfigError),
        ({"kv_cache_gib": 1e6}, RolloutConfigError),
        ({"max_model_len": 513}, RequestTooLongError),
        ({"sleep_mode": True}, RolloutConfigError),
    ):
        with raises(error, field=next(iter(changes))):
            launch(**changes)
    with socket.create_server(("127.0.0.1", 0)) as taken, raises(RolloutConfigError, field="port"):
        launch(port=taken.getsockname()[1])
    assert time.process_time() - begin < 5
    assert not (tmp_path / "logs").exists()


def process_group_alive(pid: int) -> bool:
    """True if a process is left of the group that the supervisor `pid` leads."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == pid and fields[0] != "Z":
            return True
    return False


@pytest.mark.thorough
def test_failed_start_is_diagnosed_and_leaves_no_process(model_folder: Path, tmp_path: Path) -> None:
    """Killed launchers are in the tests of the supervisor."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model_folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50_000])  # an incomplete download
    group = ServerGroup.launch(broken, config_for_tests(), log_dir=tmp_path)
    pid = group.servers[0].pid
    assert pid is not None
    with raises(ServerStartError, log_path=tmp_path / "server_0.log") as caught:
        group.wait_ready()
    assert caught.value.reason.startswith("bad model: broken safetensors")
    assert "\n" not in caught.value.reason
    assert not process_group_alive(pid)
    (sockets,) = re.findall(r"^VLLM_RPC_BASE_PATH=(.+)$", (tmp_path / "server_0.log").read_text(), re.MULTILINE)
    assert not Path(sockets).exists()


# ---- examples -------------------------------------------------------------------------------------------------------
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_example_generate(pair: ServerGroup) -> None:
    endpoint = pair.endpoints[0]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "generate.py"), endpoint.url, "w5 w6", "w7", "--n", "2", "--max-tokens", "4"],
        env={**os.environ, "VLLM_API_KEY": str(endpoint.api_key)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(line.split(" (")[0] for line in lines[:-1]) == ["'w5 w6' #0", "'w5 w6' #1", "'w7' #0", "'w7' #1"]
    assert lines[-1].endswith(" tokens, 0 retries")
