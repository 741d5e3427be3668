"""A tiny model with random weights, a pair of real servers for the whole session, and a proxy that does harm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves test folders off the path

from rollout_vllm_helpers import HarmfulProxy, config_for_tests

from rollout_vllm import RolloutClient, ServerGroup

BUILD_MODEL = """
import sys, torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
torch.manual_seed(0)
config = Qwen3Config(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, tie_word_embeddings=True, max_position_embeddings=512, bos_token_id=None,
    eos_token_id=1, pad_token_id=0)
model = Qwen3ForCausalLM(config)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.mul_(4.0)  # far from uniform, so that wrong log-probs show
model.save_pretrained(sys.argv[1])
vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 64)}
tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
    chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}").save_pretrained(sys.argv[1])
from peft import LoraConfig, get_peft_model
adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
for name, parameter in adapted.named_parameters():
    if "lora_" in name:
        torch.nn.init.normal_(parameter, std=0.5)
adapted.save_pretrained(sys.argv[2])
"""


def pytest_configure() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a process of its own: importing torch and transformers here would slow every other test module."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-c", BUILD_MODEL, str(folder / "model"), str(folder / "adapter")]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def model_folder(built: Path) -> Path:
    return built / "model"


@pytest.fixture(scope="session")
def adapter_folder(built: Path) -> Path:
    return built / "adapter"


@pytest.fixture(scope="session")
def pair(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerGroup]:
    """Two servers. A test that kills one has it restarted."""
    config = config_for_tests(num_servers=2, max_lora_rank=8, control_routes=True)
    with ServerGroup.launch(model_folder, config, log_dir=tmp_path_factory.mktemp("logs")) as group:
        group.wait_ready()
        yield group


@pytest.fixture
def client(pair: ServerGroup) -> Iterator[RolloutClient]:
    with RolloutClient(pair.endpoints, config_for_tests()) as made:
        yield made


@pytest.fixture
def proxy(pair: ServerGroup) -> Iterator[HarmfulProxy]:
    made = HarmfulProxy(pair.endpoints[0])
    yield made
    made.close()
