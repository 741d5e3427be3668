"""Other architectures and several servers: experts on one worker and on two, Phi-3 with fused projections.

The thorough test goes through the families that vLLM's CPU build can serve, in one process.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import weight_sync_helpers as helpers
from weight_sync_helpers import Server, assert_serves

from plinth_testing import raises, random_model, run_script, tiny_vlm
from weight_sync import HfFolderSource, ModuleSource, ReceiverError, SyncConfig, WeightPusher, WeightSyncError

pytestmark = [pytest.mark.slow, pytest.mark.long]  # three servers

Servers = dict[str, tuple[Server, Path]]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two servers of Qwen3-MoE, the second with tensor parallelism, and one of Phi-3 that has random weights."""
    running: Servers = {}
    try:
        for name, family, args in (("one", "qwen3_moe", []), ("two", "qwen3_moe", TWO_RANKS), ("phi3", "phi3", RANDOM)):
            folder = tmp_path_factory.mktemp(name)
            helpers.save_model(helpers.tiny_model(family, tied=False, seed=1), folder / "model")
            server = helpers.start_server(folder / "model", folder / "server.log", extra_args=args)
            running[name] = (server, folder)
        for server, _ in running.values():
            helpers.wait_healthy(server)
        yield running
    finally:
        for server, _ in running.values():
            helpers.stop_server(server)


TWO_RANKS = ["--tensor-parallel-size", "2"]
RANDOM = ["--load-format", "dummy"]


def experts(*, seed: int, hidden: int = 64) -> Any:
    return helpers.tiny_model("qwen3_moe", tied=False, hidden=hidden, seed=seed)


def folder_of(model: Any, folder: Path) -> HfFolderSource:
    """The model's tensors under the names of its folder: transformers fuses experts after loading."""
    return HfFolderSource(helpers.save_model(model, folder))


def test_fused_projections(servers: Servers) -> None:
    model = helpers.tiny_model("phi3", tied=False, seed=2)
    with WeightPusher(ModuleSource(model), [servers["phi3"][0]], SyncConfig(verify=True)) as pusher:
        pusher.push(1)
    assert assert_serves(servers["phi3"][0], model) <= 1e-4


def test_tensor_parallel_server_recovers_after_failed_pushes(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = servers["two"][0]
    model = experts(seed=4)
    source = folder_of(model, tmp_path / "4")
    with monkeypatch.context() as patch, WeightPusher(source, [server]) as pusher:
        helpers.flip_bytes(patch, 1)
        assert pusher.push(1).num_attempts == 2
        other = WeightPusher(source, [server])
        with other, pytest.raises(WeightSyncError) as caught:
            other.push(2)
        helpers.assert_not_claimed(caught.value)
        assert assert_serves(server, model) <= 1e-4
    misfit = experts(hidden=128, seed=4)
    with (
        WeightPusher(folder_of(misfit, tmp_path / "misfit"), [server]) as pusher,
        raises(ReceiverError, kind="plan"),
    ):
        pusher.push(3)
    assert helpers.is_paused(server)
    model = experts(seed=5)
    with WeightPusher(folder_of(model, tmp_path / "5"), [server]) as pusher:
        assert pusher.push(4).num_attempts == 1
    assert assert_serves(server, model) <= 1e-4


@pytest.mark.parametrize("apply", ["auto", "layerwise"])
def test_experts_are_packed_again_and_verified_in_that_form(servers: Servers, apply: Any, tmp_path: Path) -> None:
    server, folder = servers["one"]
    before = [helpers.generate(server, prompt) for prompt in helpers.PROMPTS]
    config = SyncConfig(verify=True, apply=apply)
    with WeightPusher(HfFolderSource(folder / "model"), [server], config) as pusher:
        assert pusher.push(1).num_attempts == 1
    assert [helpers.generate(server, prompt) for prompt in helpers.PROMPTS] == before
    model = experts(seed=7)
    with WeightPusher(folder_of(model, tmp_path / "other"), [server], config) as pusher:
        pusher.push(2)
    assert assert_serves(server, model) <= 1e-4
    with WeightPusher(HfFolderSource(folder / "model"), [server], config) as pusher:
        pusher.push(3)
    assert "calls of replaced parts: {'process_weights_after_loading': 1}" in server.log.read_text()


def test_all_servers_or_none_and_a_restarted_server(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (one, _), (two, folder) = servers["one"], servers["two"]
    model = experts(seed=2)
    source = helpers.ServerKillingSource(folder_of(model, tmp_path / "model"))
    with WeightPusher(source, [one, two], SyncConfig(verify=True)) as pusher:
        pusher.push(1)
        assert assert_serves(one, model) <= 1e-4
        assert assert_serves(two, model) <= 1e-4
    monkeypatch.setattr(SyncConfig, "bucket_bytes", lambda *_: 40_000)
    with WeightPusher(source, [one, two]) as pusher:
        source.process_group = two.process.pid
        with pytest.raises(WeightSyncError):
            pusher.push(2)
        source.process_group = None
        two.process.wait(20)
        assert helpers.call(one, "GET", "/is_paused")[1] == {"is_paused": True}
        helpers.assert_reports_version(one, 1)
        port = int(two.url.rpartition(":")[2])
        again = helpers.start_server(folder / "model", folder / "again.log", port=port)
        try:
            helpers.wait_healthy(again)
            assert pusher.push(3).num_attempts == 1
            for server in (one, again):
                assert_serves(server, model)
        finally:
            helpers.stop_server(again)


SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "num_key_value_heads": 2}
ROUTED = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
ROUTED |= {"moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}
GATED = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SCALED = {"tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 32}
PLAIN_HEADS = ("head_dim", "num_key_value_heads")
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256}
WITHOUT_GPT2 = (*PLAIN_HEADS, "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
NEMOTRON: dict[str, Any] = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1}
NEMOTRON |= {"chunk_size": 16, "layers_block_type": ["linear_attention", "full_attention", "mlp"]}
MAMBA = (*PLAIN_HEADS, "intermediate_size", "num_attention_heads", "max_position_embeddings")

#: Class of the config, keys that it does not have, its own keys, dtype of the server.
FAMILIES: dict[str, tuple[str, tuple[str, ...], dict[str, Any], str]] = {
    "llama": ("LlamaConfig", (), {}, "float32"),
    "qwen2": ("Qwen2Config", ("head_dim",), {"tie_word_embeddings": True}, "float32"),
    "qwen3": ("Qwen3Config", (), {}, "float32"),
    "qwen3_moe": ("Qwen3MoeConfig", (), {**SMALL_EXPERTS, "norm_topk_prob": True}, "float32"),
    "mixtral": ("MixtralConfig", (), {"num_local_experts": 4, "num_experts_per_tok": 2}, "float32"),
    "mistral": ("MistralConfig", (), {"sliding_window": 16}, "float32"),
    "gemma2": ("Gemma2Config", (), SCALED, "float32"),
    "gemma3": ("Gemma3TextConfig", (), {**SCALED, "layer_types": ["sliding_attention", "full_attention"]}, "float32"),
    "phi3": ("Phi3Config", ("head_dim",), {}, "float32"),
    "olmo2": ("Olmo2Config", ("head_dim",), {}, "float32"),
    "glm4": ("Glm4Config", (), {}, "float32"),
    "gpt2": ("GPT2Config", (*WITHOUT_GPT2, "intermediate_size"), {**GPT2, "tie_word_embeddings": True}, "float32"),
    "gpt_neox": ("GPTNeoXConfig", PLAIN_HEADS, {"rotary_pct": 0.25}, "float32"),
    "opt": ("OPTConfig", PLAIN_HEADS, {"ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.2}, "float32"),
    "deepseek_v2": ("DeepseekV2Config", ("head_dim",), {**MLA, **ROUTED, "q_lora_rank": None}, "bfloat16"),
    "mamba2": ("Mamba2Config", MAMBA, {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1}, "float32"),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        ("head_dim",),
        {**MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 64},
        "float32",
    ),
    "falcon_h1": ("FalconH1Config", (), {**MAMBA2, "mamba_d_ssm": 128}, "float32"),
    "nemotron_h": ("NemotronHConfig", ("num_hidden_layers",), NEMOTRON, "float32"),
    "qwen3_next": (
        "Qwen3NextConfig",
        (),
        {
            **GATED,
            **SMALL_EXPERTS,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "bfloat16",
    ),
}


@pytest.mark.thorough
def test_every_family_computes_with_the_pushed_weights(tmp_path: Path) -> None:
    """Phi (vLLM's transformers backend) is rejected: its loader replaces the head's bias. Mamba needs a GPU."""
    for name, (config_class, without, changes, _) in FAMILIES.items():
        for seed, which in enumerate(("old", "new")):
            config = helpers.family_config(config_class, *without, **changes)
            helpers.save_model(random_model(config, seed=seed, random_norms=True), tmp_path / name / which)
    for seed, which in enumerate(("old", "new")):  # the last of its prompts has an image
        tiny_vlm(tmp_path / "idefics3" / which, "idefics3", seed=seed, initializer_range=0.2)
    arguments = [*(f"{name}:{family[-1]}" for name, family in FAMILIES.items()), "idefics3"]
    script = Path(__file__).with_name("weight_sync_families_worker.py")
    text = run_script(script, tmp_path, *arguments, timeout_s=1800)
    reported = [json.loads(line.removeprefix("family ")) for line in text.splitlines() if line.startswith("family ")]
    assert [row["family"] for row in reported] == [*FAMILIES, "idefics3"]
    for row in reported:
        assert "error" not in row, row
        assert row["moved"] > 0.5, row
        assert max(*row["auto"], *row["layerwise"]) <= 1e-4, row
        assert row["corruption"] == "verify", row
