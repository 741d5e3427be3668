"""`data.instruction=null` is decided by the rows, the reward and the model; patterns in paths are expanded."""

import json
from pathlib import Path
from typing import Any

import pytest

from plinth_testing import raises
from rl_data import DataConfig, DataConfigError, build_tiny_model
from rl_data.prompts import GSM8K_INSTRUCTION
from rl_runtime.config import ModelConfig
from rl_runtime.errors import InputError
from rl_runtime.job_config import JobConfig
from rl_runtime.resolve.instruction import resolve_instruction
from rl_runtime.resolve.resolved import ResolvedConfig
from rl_runtime.rollout.scoring_config import ScoringConfig
from rl_runtime.training.supervised_config import SupervisedConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of two schemas, a model with a chat template, and one without."""
    folder = tmp_path_factory.mktemp("instruction")
    rows: dict[str, dict[str, Any]] = {
        "gsm8k": {"question": "1+1?", "answer": "#### 2"},
        "asked": {"question": "1+1? End with #### n.", "answer": "#### 2"},
        "verl": {
            "prompt": [{"role": "user", "content": "1+1?"}],
            "reward_model": {"ground_truth": "2"},
            "data_source": "openai/gsm8k",
        },
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    build_tiny_model(folder / "plain")
    (build_tiny_model(folder / "chat") / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


@pytest.mark.parametrize(
    ("model", "rows", "data", "reward", "expected"),
    [
        ("chat", "gsm8k", {}, {}, GSM8K_INSTRUCTION),
        ("chat", "gsm8k", {"instruction": ""}, {}, ""),
        ("chat", "gsm8k", {"instruction": "Think."}, {}, "Think."),
        ("chat", "gsm8k", {"system_prompt": "Give #### n."}, {}, ""),
        ("chat", "gsm8k", {"chat_template": "never"}, {}, ""),
        ("chat", "gsm8k", {}, {"method": "flexible"}, ""),
        ("chat", "gsm8k", {}, {"function": "mine:score"}, ""),
        ("chat", "verl", {}, {}, ""),
        ("chat", "asked", {}, {}, ""),
        ("plain", "gsm8k", {}, {}, ""),
        ("none", "gsm8k", {}, {}, ""),
    ],
)
def test_the_instruction_is_that_of_a_reward_that_needs_its_marker(
    folder: Path, model: str, rows: str, data: dict[str, Any], reward: dict[str, Any], expected: str
) -> None:
    config = JobConfig(
        model=ModelConfig(path=str(folder / model)),
        data=DataConfig(train=(str(folder / f"{rows}.jsonl"),), **data),
        reward=ScoringConfig(**reward),
    )
    resolved = resolve_instruction(ResolvedConfig(config=config))
    assert resolved.config.data.instruction == expected
    assert ("data.instruction" in resolved.reasons) == (expected == GSM8K_INSTRUCTION), "the choice is shown"


def test_patterns_and_the_home_folder_are_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    both = (str(folder / "gsm8k.jsonl"), str(folder / "verl.jsonl"))
    assert DataConfig(train=("~/[gv]*.jsonl",), val=("~/verl.jsonl",)).train == both
    assert DataConfig(val=("~/pl*n:test",)).val == (f"{folder}/plain:test",)
    (folder / "set[1]").mkdir(exist_ok=True)
    assert DataConfig(val=("~/set[1]:test", "\0*")).val == (f"{folder}/set[1]:test", "\0*")
    assert SupervisedConfig(files=("~/[gv]*.jsonl",)).files == both
    assert ModelConfig(path="~/chat").path == ModelConfig(path="~/ch*").path == str(folder / "chat")
    assert ScoringConfig(model="~/pl*").model == str(folder / "plain")
    with raises(DataConfigError, field="train", value=str(folder / "*.csv")):
        DataConfig(train=("~/*.csv",))
    with raises(InputError, field="path", value="~/*"):
        ModelConfig(path="~/*")
