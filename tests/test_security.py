"""Statements of docs/security.md that a change could make untrue."""

import ast
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ds_engine import ModelShape
from ds_engine.errors import ModelError
from ds_engine.model.weights import read_config
from plinth_base import ModelFolderError
from rl_data import load_tokenizer
from rl_runtime.config import TrainerConfig
from rl_runtime.ranks.heartbeat import Heartbeats
from rollout_vllm import RolloutConfig
from rollout_vllm.servers.auth import KEY_VARIABLE
from weight_sync.channel import Listener

REPO = Path(__file__).resolve().parents[1]
SOURCES = [path for path in REPO.glob("packages/*/*/**/*.py") if path.parts[-2] not in ("tests", "examples")]
SOURCES = [path for path in SOURCES if not {"tests", "examples", "plinth_testing"} & set(path.relative_to(REPO).parts)]


@cache
def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def test_only_reward_workers_and_kept_processes_unpickle() -> None:
    """In reward workers, their parent and a standby only; torch.load is told to read tensors and plain values."""
    places = set()
    for path in SOURCES:
        for call in calls(path):
            name = ast.unparse(call.func)
            safe = {"weights_only": "True"}.items() <= {k.arg: ast.unparse(k.value) for k in call.keywords}.items()
            if name.endswith(("pickle.load", "pickle.loads", "Unpickler")) or (name == "torch.load" and not safe):
                places.add(f"{path.parent.name}/{path.name}")
    assert places == {"episodes/rewards.py", "app/kept.py"}


def test_every_load_by_transformers_refuses_code_of_the_folder() -> None:
    loads = [
        (path, call)
        for path in SOURCES
        for call in calls(path)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
        and "uto" in ast.unparse(call.func)  # AutoModelForCausalLM, _auto_class
    ]
    assert len(loads) >= 8
    for path, call in loads:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if None in given:  # **options
            assert '"trust_remote_code": False' in path.read_text() or "trust_remote_code=False" in ast.unparse(call)
        else:
            assert given.get("trust_remote_code") == "False", f"{path.name}:{call.lineno}"


@pytest.mark.parametrize("load", [read_config, ModelShape.read, load_tokenizer])
def test_code_of_a_model_folder_is_not_run_whatever_the_user_answers(
    load: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.Tok", None]}
    config = {"model_type": "hostile", "architectures": ["Model"], "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tok", "auto_map": classes}))
    (tmp_path / "vocab.json").write_text("{}")  # a folder without such a file is refused before anything reads it
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    with pytest.raises((ModelError, ModelFolderError, ValueError), match=r"custom code|trust_remote_code"):
        load(str(tmp_path))
    assert not (tmp_path / "was_run").exists()


def test_listeners_are_on_the_loopback_by_default() -> None:
    assert RolloutConfig().host == "127.0.0.1"
    heartbeats = Heartbeats()
    assert heartbeats.receiver.host == "127.0.0.1"
    assert len(heartbeats.receiver.token) == 32
    heartbeats.close()
    listener = Listener()
    assert listener.address.startswith("unix:")
    assert len(listener.token) == 32
    listener.close()
    assert TrainerConfig().private_output


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{{open('{path}','w')}}",
        "The final answer is $open('{path}','w')$. I hope it is correct.",
        "answer: 1+(open('{path}','w'))",
        r"\boxed{{\text{{__import__('os').system('touch {path}')}}}}",
        "$x = __import__('pathlib').Path('{path}').touch()$",
    ],
)
def test_math_verify_runs_no_code_of_an_answer(text: str, tmp_path: Path) -> None:
    from rl_data.rewards.equivalence import MathReward

    MathReward().answer(text.format(path=tmp_path / "was_run"))
    assert not (tmp_path / "was_run").exists()


def test_the_documented_command_of_an_existing_server_gives_it_its_key() -> None:
    text = (REPO / "docs" / "rollout_vllm.md").read_text()
    [line] = [line for line in text.splitlines() if "vllm.entrypoints.openai.api_server" in line]
    assert line.startswith(f"{KEY_VARIABLE}=$KEY ")
