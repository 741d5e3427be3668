"""The start of a server: its command and environment, checks before it, the diagnosis of its log."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing import raises
from plinth_testing.strategies import json_values
from rollout_vllm import (
    ModelFolderError,
    RequestTooLongError,
    RolloutConfig,
    RolloutConfigError,
)
from rollout_vllm.config import check_request_length
from rollout_vllm.servers.auth import KEY_VARIABLE, ApiKeyMiddleware
from rollout_vllm.servers.command import (
    graph_sizes,
    has_multicast,
    server_arguments,
    server_environment,
    server_threads,
)
from rollout_vllm.servers.device import Device, check_build, check_device_features, detect_device
from rollout_vllm.servers.diagnose import diagnose
from rollout_vllm.servers.memory import (
    ServerMemory,
    available_memory_bytes,
    check_kv_cache,
    check_memory,
    estimate_server_memory,
    kv_bytes_per_token,
    kv_value_bytes,
)
from rollout_vllm.servers.model_folder import check_context, check_folder
from rollout_vllm.servers.process import reserve_port

QUICK = settings(deadline=None, derandomize=True)
QWEN = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
    "max_position_embeddings": 40960,
    "layer_types": ["full_attention"] * 28,
}


def options(args: list[str]) -> dict[str, str]:
    return {a: b for a, b in zip(args, [*args[1:], "--"], strict=True) if a.startswith("--")}


def test_cpu_arguments() -> None:
    config = RolloutConfig(max_model_len=64, kv_cache_gib=0.5, extra_args=("--seed", "3"))
    args = server_arguments(config, "m", port=8123, device="cpu", extra_args=["--weights", "x"])
    given = options(args)
    assert given["--port"] == "8123"
    assert given["--host"] == "127.0.0.1"
    assert given["--kv-cache-memory-bytes"] == str(2**29)
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert {"--enforce-eager", "--no-enable-chunked-prefill", "--enable-prefix-caching"} <= set(args)
    assert "--gpu-memory-utilization" not in given
    assert args[-4:] == ["--weights", "x", "--seed", "3"]


def test_gpu_arguments() -> None:
    config = RolloutConfig(tensor_parallel_size=2, gpu_memory_utilization=0.4, enforce_eager=False)
    args = server_arguments(config, "m", port=1, device="cuda")
    assert options(args)["--tensor-parallel-size"] == "2"
    assert options(args)["--gpu-memory-utilization"] == "0.4"
    assert "--enforce-eager" not in args
    assert "--enable-chunked-prefill" in args
    assert "--kv-cache-memory-bytes" not in args


def test_graphs_are_captured_for_sizes_that_no_step_exceeds_by_a_tile() -> None:
    for max_num_seqs in (1, 3, 8, 100, 256, 512, 1000):
        sizes = graph_sizes(max_num_seqs)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == min(2 * max_num_seqs, 512)
        padding = [min(size for size in sizes if size >= num) - num for num in range(1, sizes[-1] + 1)]
        assert max(padding[:8]) <= 3
        assert max(padding) < 32
    assert len(graph_sizes(256)) == 24  # vLLM's own are 51

    def captured(device: Device = "cuda", **settings: Any) -> bool:
        arguments = server_arguments(RolloutConfig(**settings), "m", port=1, device=device)
        return any(each.startswith("--cudagraph-capture-sizes") for each in arguments if each not in own)

    own = ("-cc", "--max-cudagraph-capture-size", "--cudagraph_capture_sizes")
    assert captured()
    assert not captured("cpu")
    assert not captured(enforce_eager=True)
    assert not captured(fast_paths=False)
    for name in own:
        assert not captured(extra_args=(name, "8"))


def test_all_reduces_are_not_fused_where_the_environment_disables_multicast() -> None:
    """vLLM 0.26 then reads an illegal address while it measures its memory, and does not answer again."""
    pair = RolloutConfig(tensor_parallel_size=2)
    unfused = "--compilation-config.pass_config.fuse_allreduce_rms=false"

    def arguments(config: RolloutConfig, value: str | None, device: Device = "cuda") -> list[str]:
        environment = {} if value is None else {"TORCH_SYMM_MEM_DISABLE_MULTICAST": value}
        return server_arguments(config, "m", port=1, device=device, multicast=has_multicast(environment))

    assert unfused in arguments(pair, "1")
    assert unfused not in [*arguments(pair, None), *arguments(pair, "0"), *arguments(pair, "")]
    assert unfused not in arguments(RolloutConfig(), "1")
    assert unfused not in arguments(pair, "1", device="cpu")
    for name in ("--compilation-config", "--compilation_config", "-cc"):
        own = RolloutConfig(tensor_parallel_size=2, extra_args=(name, '{"cudagraph_mode": "NONE"}'))
        assert unfused not in arguments(own, "1"), "a configuration of the user's is not mixed with ours"


def test_settings_left_open_follow_the_device() -> None:
    gpu, cpu = (server_arguments(RolloutConfig(), "m", port=1, device=device) for device in ("cuda", "cpu"))
    assert "--enforce-eager" not in gpu
    assert "--enforce-eager" in cpu
    assert "--enforce-eager" in server_arguments(RolloutConfig(enforce_eager=True), "m", port=1, device="cuda")
    assert options(gpu)["--max-num-seqs"] == options(cpu)["--max-num-seqs"] == "256"
    assert options(gpu)["--gpu-memory-utilization"] == "0.5"


@QUICK
@given(st.integers(1, 8), st.integers(1, 512), st.integers(1, 10**6), st.booleans())
def test_server_memory_grows_with_what_it_holds(tp: int, sequences: int, tokens: int, graphs: bool) -> None:
    def memory(**changes: Any) -> ServerMemory:
        sizes = {
            "weight_bytes": 1_192_099_840,
            "kv_bytes_per_token": 114_688,
            "kv_tokens": tokens,
            "hidden": 1024,
            "intermediate": 3072,
            "vocab": 151_936,
            "max_num_seqs": sequences,
            "tensor_parallel_size": tp,
            "graphs": graphs,
        }
        return estimate_server_memory(**(sizes | changes))

    whole = memory()
    assert whole.total == whole.weights + whole.kv_cache + whole.workspace
    assert whole.kv_cache * tp >= tokens * 114_688
    assert memory(kv_tokens=tokens + 1).total >= whole.total
    assert memory(max_num_seqs=sequences + 1).workspace > whole.workspace
    assert memory(tensor_parallel_size=tp + 1).total <= whole.total
    assert memory(graphs=True).total >= whole.total


def test_environment() -> None:
    base = {"PATH": "/bin", "VLLM_CPU_KVCACHE_SPACE": "9", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    base["RAY_AUTH_TOKEN"] = "secret"
    env = server_environment(base, RolloutConfig(), device="cpu", api_key="k", num_cores=2, extra={"A": "1"})
    assert env["PATH"] == "/bin"
    assert env["A"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert not {"MASTER_PORT", "RAY_AUTH_TOKEN"} & set(env)
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    public = server_environment(base, RolloutConfig(host="10.0.0.1"), device="cpu", api_key="k", num_cores=2)
    assert "GLOO_SOCKET_IFNAME" not in public
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env  # set by torchrun: the server would wait for its store
    assert (env["OMP_NUM_THREADS"], env[KEY_VARIABLE], env["PLINTH_ROLLOUT_FORK"]) == ("1", "k", "1")
    assert "VLLM_API_KEY" not in env  # it would be part of the key of vLLM's compiled graphs
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    sharded = server_environment(base, RolloutConfig(tensor_parallel_size=2), device="cpu", api_key="k", num_cores=2)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in sharded  # one worker per shard
    many = server_environment(base, RolloutConfig(cpu_threads=4), device="cpu", api_key="k", num_cores=2)
    assert "PLINTH_ROLLOUT_FORK" not in many  # an OpenMP pool does not survive a fork
    gpu = server_environment(base, RolloutConfig(), device="cuda", api_key="k", num_cores=2, gpu_ids=[2, 3])
    assert gpu["CUDA_VISIBLE_DEVICES"] == "2,3"
    quantized = RolloutConfig(quantization="bitsandbytes", max_lora_rank=8)
    variable = "PLINTH_ROLLOUT_QUANTIZATION"
    assert server_environment(base, quantized, device="cuda", api_key="k", num_cores=2)[variable] == "bitsandbytes"
    assert variable not in gpu
    assert gpu["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in gpu
    assert gpu["OMP_NUM_THREADS"] == "1"  # several servers' threads would wait for each other
    wide = server_environment(base, RolloutConfig(cpu_threads=4), device="cuda", api_key="k", num_cores=2)
    assert wide["OMP_NUM_THREADS"] == "4"
    method = "VLLM_WORKER_MULTIPROC_METHOD"
    assert gpu[method] == "fork"
    two = RolloutConfig(tensor_parallel_size=2)
    assert method not in server_environment(base, two, device="cuda", api_key="k", num_cores=2)
    given = server_environment(base | {method: "spawn"}, RolloutConfig(), device="cuda", api_key="k", num_cores=2)
    assert given[method] == "spawn"


@QUICK
@given(st.integers(1, 256), st.integers(1, 16))
def test_cpu_threads(cores: int, servers: int) -> None:
    threads = server_threads("cpu", cores, servers, None)
    assert threads >= 1
    assert threads == 1 or threads * servers <= cores / 2
    assert server_threads("cuda", cores, servers, None) == 1
    assert server_threads("cuda", cores, servers, 7) == server_threads("cpu", cores, servers, 7) == 7


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        (b"Bearer right", True),
        (b"bearer  right ", True),
        (b"Bearer wrong", False),
        (b"Bearer righ", False),
        (b"Bearer ", False),
        (b"Basic right", False),
        (b"right", False),
        (None, False),
    ],
)
def test_only_requests_with_the_key_reach_the_server(
    monkeypatch: pytest.MonkeyPatch, given: bytes | None, passes: bool
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "right")
    reached: list[str] = []
    sent: list[object] = []

    async def app(scope: object, receive: object, send: object) -> None:
        reached.append(scope["type"])  # type: ignore[index]

    async def send(message: object) -> None:
        sent.append(message)

    headers = [(b"host", b"x")] + ([] if given is None else [(b"Authorization", given)])
    for kind in ("http", "websocket"):
        asyncio.run(ApiKeyMiddleware(app)({"type": kind, "headers": headers}, None, send))  # type: ignore[arg-type]
    assert reached == (["http", "websocket"] if passes else [])
    assert [m.get("status", m.get("code")) for m in sent] == ([] if passes else [401, None, 1008])  # type: ignore[attr-defined]


def versions(**installed: str) -> Callable[[str], str]:
    """Stands for importlib.metadata.version, with these distributions."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name.replace("-", "_")]

    return version


def test_detect_device() -> None:
    assert detect_device(versions(vllm_cpu="0.32.0")) == ("cpu", "0.32.0")
    assert detect_device(versions(vllm="0.32.0+cpu"))[0] == "cpu"
    assert detect_device(versions(vllm="0.26.0"))[0] == "cuda"
    with raises(RolloutConfigError, field="urls"):
        detect_device(versions())


def test_a_build_for_another_device_is_refused() -> None:
    """The installed build says nothing about this host's GPUs: the remedy names the setting of the device."""
    check_build("cuda", versions(vllm="0.26.0"))
    check_build("cpu", versions(vllm_cpu="0.32.0"))
    with raises(RolloutConfigError, field="urls") as caught:
        check_build("cpu", versions(vllm="0.26.0"), device_key="trainer.device")
    assert caught.value.remedy.startswith(
        "set trainer.device=cuda if there is a GPU, install vllm-cpu in place of vllm"
    )
    with raises(RolloutConfigError, field="urls") as caught:
        check_build("cuda", versions(vllm_cpu="0.32.0"))
    assert caught.value.remedy.startswith("set device=cpu, install vllm in place of vllm-cpu")


def test_kv_bytes_per_token() -> None:
    assert kv_bytes_per_token(QWEN, 2, 1) == 2 * 28 * 8 * 128 * 2
    assert kv_bytes_per_token(QWEN, 4, 4) == 2 * 28 * 2 * 128 * 4
    assert kv_bytes_per_token(QWEN | {"layer_types": ["sliding_attention"]}, 2, 1) is None
    assert kv_bytes_per_token(QWEN | {"kv_lora_rank": 512}, 2, 1) is None


@QUICK
@given(st.integers(1, 5000), st.floats(0.001, 4), st.sampled_from(["cpu", "cuda"]))
def test_kv_cache_error_gives_sizes_that_suffice(max_len: int, gib: float, device: str) -> None:
    def check(max_model_len: int, kv_cache_gib: float) -> None:
        config = RolloutConfig(max_model_len=max_model_len, kv_cache_gib=kv_cache_gib)
        check_kv_cache(config, QWEN, device)  # type: ignore[arg-type]

    error = None
    try:
        check(max_len, gib)
    except RolloutConfigError as caught:
        error = caught
    if error is None:
        return
    assert error.field == "kv_cache_gib"
    check(max_len, float(str(error.allowed).removeprefix("at least ")))
    fits = int(str(error.remedy).rpartition(" ")[2])
    assert fits < max_len
    if fits:
        check(fits, gib)


def test_fp8_kv_cache_needs_a_gpu_and_half_of_the_memory() -> None:
    config = RolloutConfig(kv_cache_dtype="fp8")
    args = server_arguments(config, "m", port=1, device="cuda")
    assert args[args.index("--kv-cache-dtype") + 1] == "fp8"
    assert "--kv-cache-dtype" not in server_arguments(RolloutConfig(), "m", port=1, device="cuda")
    assert 2 * kv_value_bytes(config) == kv_value_bytes(RolloutConfig())
    check_device_features(config, "cuda")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_cache_dtype", "fp8"),
        ("sleep_mode", True),
        ("quantization", "bitsandbytes"),
        ("tensor_parallel_size", 2),
    ],
)
def test_settings_of_gpus_are_refused_on_the_cpu(field: str, value: Any) -> None:
    with raises(RolloutConfigError, field=field, value=value):
        check_device_features(RolloutConfig(**{field: value}), "cpu")


def test_context_and_request_length() -> None:
    check_context(RolloutConfig(max_model_len=40960), QWEN)
    with raises(RequestTooLongError, field="max_model_len", value=40961):
        check_context(RolloutConfig(max_model_len=40961), QWEN)
    check_request_length(100, 28, 128)
    with raises(RequestTooLongError, field="max_model_len", value=128, allowed="at least 129, or None"):
        check_request_length(101, 28, 128)


@pytest.mark.parametrize("path", ["", ".", "~no-such-user/x", "a\0b", "x" * 5000, "/dev/null", "a/b/c"])
def test_unusable_model_path_is_named(path: str) -> None:
    with raises(ModelFolderError):
        check_folder(path)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(json_values(), st.sampled_from(sorted([*QWEN, "layer_types", "kv_lora_rank", "head_dim", "rope_scaling"])))
def test_odd_model_config_is_refused_or_not_judged(junk: object, key: str) -> None:
    config = RolloutConfig(max_model_len=64, kv_cache_gib=1.0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text("{}")
        (Path(folder) / "config.json").write_text(json.dumps(junk))
        if isinstance(junk, dict):
            assert check_folder(folder, load_format="dummy") == junk
        else:
            with raises(ModelFolderError, value=folder):
                check_folder(folder, load_format="dummy")
    odd = QWEN | {key: junk}
    with suppress(RolloutConfigError):
        check_context(config, odd)
    with suppress(RolloutConfigError):
        check_kv_cache(config, odd, "cpu")


def test_memory() -> None:
    assert available_memory_bytes("MemTotal: 9 kB\nMemAvailable:    2048 kB\n") == 2048 * 1024
    assert available_memory_bytes("") is None
    config = RolloutConfig(num_servers=3, kv_cache_gib=1.0)
    check_memory(config, "cpu", 3 << 30)
    check_memory(config, "cuda", 1)
    with raises(RolloutConfigError, field="kv_cache_gib", value=1.0):
        check_memory(config, "cpu", 2 << 30)


def test_model_folder(tmp_path: Path) -> None:
    """The rest is a test of plinth_base."""
    assert check_folder("Qwen/Qwen3-0.6B") is None, "a model on the Hub"
    for wrong in (str(tmp_path / "none"), "./Qwen/x", "qwen"):
        with raises(ModelFolderError, value=wrong.removeprefix("./")):
            check_folder(wrong)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{")
    with raises(ModelFolderError):
        check_folder(str(tmp_path), load_format="dummy")
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    with raises(ModelFolderError):
        check_folder(str(tmp_path))
    assert check_folder(str(tmp_path), load_format="dummy") == QWEN
    (tmp_path / "model.safetensors").touch()
    assert check_folder(str(tmp_path)) == QWEN


@pytest.mark.parametrize("has_index", [False, True])
def test_weights_that_vllm_would_load_and_the_trainer_would_not_are_named(tmp_path: Path, has_index: bool) -> None:
    shard = "model-00001-of-00001.safetensors" if has_index else "adapter_model.safetensors"
    for name in ("tokenizer.json", "model.safetensors", shard):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    if has_index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.warns(UserWarning, match=shard), raises(ModelFolderError, value=str(tmp_path)) as caught:
        check_folder(str(tmp_path))
    assert shard in caught.value.problem
    if has_index:  # then both read its files
        (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
        with pytest.warns(UserWarning, match="consolidated"):
            assert check_folder(str(tmp_path)) == QWEN


def test_reserved_ports_are_distinct_and_usable() -> None:
    held = [reserve_port("127.0.0.1", None) for _ in range(20)]
    ports = [s.getsockname()[1] for s in held]
    assert len(set(ports)) == 20
    with socket.socket() as server:  # as vLLM binds
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", ports[0]))
        server.listen()
        with raises(RolloutConfigError, field="port", value=ports[0]):
            reserve_port("127.0.0.1", ports[0])
    for s in held:
        s.close()
    with raises(RolloutConfigError, field="host", value="192.0.2.7"):
        reserve_port("192.0.2.7", 1)


@pytest.mark.parametrize(
    ("log", "status", "expected"),
    [
        ("(APIServer pid=1) OSError: [Errno 98] Address already in use", 1, "port in use"),
        (
            "(EngineCore pid=2) ERROR 11-20 23:41:44 [core.py:1] ValueError: No available memory for the cache blocks.",
            1,
            "too little memory for the KV cache",
        ),
        (
            "ValueError: 1 GiB KV cache is needed, which is larger than the available KV cache memory (0.1 GiB).",
            1,
            "the KV cache is too small",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 1, "out of GPU memory"),
        (
            "ValueError: Free memory on device (1/139 GiB) on startup is less than desired GPU memory utilization",
            1,
            "out of GPU memory",
        ),
        (
            "plinth-rollout-server: error: unrecognized arguments: --nope",
            2,
            "vLLM rejected an argument: unrecognized arguments: --nope",
        ),
        ("ValueError: Model architectures ['Foo'] are not supported for now.", 1, "bad model"),
        ("KeyError: 'first'\nRuntimeError: Engine core initialization failed. See above.", 1, "KeyError: 'first'"),
        ("RuntimeError: Engine core initialization failed.", 1, "RuntimeError: Engine core"),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR\n"
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            1,
            "illegal memory access on a GPU: RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR",
        ),
        (
            "WARNING 11-25 00:46:12 [interface.py:368] Failed to import from vllm._C: ModuleNotFoundError("
            "\"No module named 'vllm._C'\")\nRuntimeError: Failed to infer device type, please set the variable",
            1,
            "vLLM finds no device of its build",
        ),
        ("ModuleNotFoundError: No module named 'vllm'", 1, "vLLM is not installed in this Python"),
        ("/opt/python: No module named vllm", 1, "vLLM is not installed in this Python"),
        ("loading", 137, "killed (SIGKILL)"),
        ("INFO 11-20 23:41:44 [a.py:1] the end", 3, "exit status 3: the end"),
        ("", 1, "exit status 1: no output"),
        ("", None, "no answer"),
    ],
)
def test_diagnose(log: str, status: int | None, expected: str) -> None:
    assert diagnose(log, status).startswith(expected)


@QUICK
@given(st.text(), st.none() | st.integers(0, 255))
def test_diagnosis_is_one_short_line(log: str, status: int | None) -> None:
    reason = diagnose(log, status)
    assert reason
    assert len(reason) <= 400
    assert "\n" not in reason


def test_states_are_not_cached_where_a_prompt_is_one_chunk(tmp_path: Path) -> None:
    """vLLM keeps recurrent states only at the ends of chunks, and refuses to cache them otherwise."""
    for content, is_cached in (
        ({"mamba_d_state": 8}, False),
        ({"text_config": {"linear_conv_kernel_dim": 4}}, False),
        ({}, True),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        cpu, gpu = (server_arguments(RolloutConfig(), str(tmp_path), port=1, device=each) for each in ("cpu", "cuda"))
        assert ("--enable-prefix-caching" in cpu) is is_cached
        assert "--enable-prefix-caching" in gpu
