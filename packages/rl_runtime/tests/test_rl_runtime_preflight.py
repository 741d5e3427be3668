"""Models that the preflight refuses, and how it says that the others are computed."""

from pathlib import Path

import transformers

from ds_engine import EngineConfig
from plinth_base.errors import prefix_fields
from plinth_testing import raises, tiny_config
from plinth_testing.vision import tiny_vlm
from rl_data import build_tiny_model
from rl_runtime import InputError, JobConfig, ModelConfig, TrainerConfig, check_architectures
from rl_runtime.app.inputs import check_context
from rl_runtime.launch.placement import Node, plan_placement
from rl_runtime.launch.servers import check_servers
from rl_runtime.launch.session import plan_session
from rl_runtime.training.engines import check_sight
from rollout_vllm import ModelFolderError, RolloutConfig, RolloutConfigError, SamplingConfig, check_launch
from rollout_vllm.servers.device import detect_device
from weight_sync import SyncConfig


def test_architectures_are_tried_before_any_process_starts(tmp_path: Path) -> None:
    """A model folder's config.json is enough; the critic is tried with its value head."""
    tiny_config("llama").save_pretrained(tmp_path / "llama")
    (actor, critic) = check_architectures(
        ModelConfig(path=str(tmp_path / "llama")), {"actor": EngineConfig(), "critic": EngineConfig()}, on_gpu=False
    )
    assert actor.startswith("LlamaForCausalLM: packed sequences equal each one alone (tried ")
    assert critic.startswith("LlamaForSequenceClassification: packed")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    transformers.BertConfig(**sizes, is_decoder=False).save_pretrained(tmp_path / "bert")
    with raises(InputError, field="model.path"):
        check_architectures(ModelConfig(path=str(tmp_path / "bert")), {"engine": EngineConfig()}, on_gpu=False)
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with raises(InputError, field="model.path"):
        check_architectures(ModelConfig(path=str(tmp_path / "bert")), {"engine": EngineConfig()}, on_gpu=False)
    with raises(InputError, field="critic.sequence_parallel", value=3):
        check_architectures(
            ModelConfig(path=str(tmp_path / "llama")), {"critic": EngineConfig(sequence_parallel=3)}, on_gpu=False
        )
    assert check_architectures(ModelConfig(), {"actor": EngineConfig()}, on_gpu=False) == []


def test_images_that_servers_on_the_cpu_read_in_another_way_are_said(tmp_path: Path) -> None:
    """Tokens of Gemma 3's images attend to later ones of their image, which vLLM's attention on CPUs cannot do."""
    lines = {}
    for family in ("gemma3", "idefics3"):
        tiny_vlm(tmp_path / family, family)
        model, engines = ModelConfig(path=str(tmp_path / family)), {"actor": EngineConfig()}
        lines[family] = [len(check_sight(model, engines, on_gpu=gpu, key="data.train")) for gpu in (False, True)]
    assert lines == {"gemma3": [1, 0], "idefics3": [0, 0]}


def test_a_model_that_needs_a_gpu_is_left_to_ranks_that_have_one(tmp_path: Path) -> None:
    """Here of a family whose small copy cannot be built at all."""
    transformers.xLSTMConfig().save_pretrained(tmp_path)
    engines = {"actor": EngineConfig()}
    with raises(InputError, field="model.path"):
        check_architectures(ModelConfig(path=str(tmp_path)), engines, on_gpu=False)
    (line,) = check_architectures(ModelConfig(path=str(tmp_path)), engines, on_gpu=True)
    assert line.endswith("the ranks try it before the first step")


def test_a_response_that_fills_the_context_is_refused(tmp_path: Path) -> None:
    """A model of 64 positions; positions that are scaled are left to vLLM."""
    config = tiny_config("llama", max_position_embeddings=64)
    config.save_pretrained(tmp_path)
    model, most = ModelConfig(path=str(tmp_path)), SamplingConfig(max_tokens=63)
    check_context(model, {"sampling": most, "validation": most})
    with raises(InputError, field="validation.max_tokens", value=64, allowed="at most 63"):
        check_context(model, {"sampling": most, "validation": SamplingConfig(max_tokens=64)})
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config.save_pretrained(tmp_path)
    check_context(model, {"sampling": SamplingConfig(max_tokens=64)})


def test_turns_are_refused_where_no_gpu_memory_is_shared() -> None:
    trainer, rollout = TrainerConfig(device="cpu", take_turns="both"), RolloutConfig()
    with raises(InputError, field="trainer.take_turns", value="both"):
        check_servers(ModelConfig(), rollout, SyncConfig(), trainer, plan_session(trainer, rollout))
    with raises(InputError, field="trainer.take_turns", value="both"):
        JobConfig(trainer=trainer, rollout=RolloutConfig(urls=("http://127.0.0.1:9",)))


def test_servers_without_a_build_of_vllm_for_their_device_are_refused() -> None:
    """As on a host without a GPU in the CUDA image."""
    is_cpu_build = detect_device()[0] == "cpu"
    node = Node(gpu_ids=["0"] if is_cpu_build else [])
    placement = plan_placement([node], device="auto", num_ranks=1, num_servers=1)
    with raises(RolloutConfigError, field="rollout.urls"):
        rollout = RolloutConfig(device="cuda" if placement.on_gpu else "cpu")
        check_servers(ModelConfig(), rollout, SyncConfig(), TrainerConfig(), placement)


def test_errors_about_servers_name_the_key_and_others_stay(tmp_path: Path) -> None:
    """A field of RolloutConfig is a key of the section that holds it; the model's folder is none."""
    folder = build_tiny_model(tmp_path / "model")
    with raises(RolloutConfigError, field="rollout.tensor_parallel_size"), prefix_fields("rollout"):
        check_launch(folder, RolloutConfig(device="cpu", tensor_parallel_size=2))
    with raises(RolloutConfigError, field="teacher.server.max_model_len"), prefix_fields("teacher.server"):
        check_launch(folder, RolloutConfig(device="cpu", max_model_len=10**9 - 1))
    (folder / "config.json").unlink()
    with raises(ModelFolderError, field=None, value=str(folder)), prefix_fields("rollout"):
        check_launch(folder, RolloutConfig(device="cpu"))
