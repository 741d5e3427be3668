"""Lines for the user about files, and the time of their loading."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plinth_testing import raises
from rl_data import DataConfig, DataError, build_tiny_model, load_tokenizer
from rl_runtime import InputError, InputsConfig, ModelConfig, SupervisedConfig
from rl_runtime.app.inputs import load_ahead, log_lines
from rl_runtime.app.supervised_run import _load
from rl_runtime.supervised_job_config import SupervisedJobConfig
from rl_runtime.training.supervised_config import FineTuningConfig

PLAIN = "warning: messages are rendered as plain text, the content of each and a line break, without roles"


def write(folder: Path, name: str, *rows: dict[str, Any]) -> str:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_one_line_says_how_messages_of_all_files_became_text(folder: Path, tmp_path: Path) -> None:
    message = {"role": "user", "content": "2+3"}
    prompts = write(tmp_path, "prompts", {"prompt": [message], "ground_truth": "5"})
    chat = write(tmp_path, "chat", {"messages": [message, {"role": "assistant", "content": "5"}]})
    model, data = ModelConfig(path=str(folder)), DataConfig(train=(prompts,), val=(prompts,))
    inputs = load_ahead(InputsConfig(model=model, data=data), SupervisedConfig(steps=1, files=(chat,)), seed=1)
    assert inputs is not None
    (line,) = inputs.lines
    assert line.startswith(PLAIN)
    assert "data.chat_template=auto; always refuses this" in line
    templated = DataConfig(train=(prompts,), chat_template="always")
    with pytest.raises(DataError) as caught:
        load_ahead(InputsConfig(model=model, data=templated), SupervisedConfig(), seed=1)
    assert caught.value.problem.startswith("data.chat_template=always")
    assert load_ahead(InputsConfig(), SupervisedConfig(), seed=1) is None


def test_lines_of_the_log_are_collected_once_and_the_log_is_as_before(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("rl_data.somewhere")
    with log_lines() as lines:
        logger.warning("%d rows", 2)
        logger.warning("%d rows", 2)
        logger.info("read")
        logger.debug("no")
    assert (lines, caplog.records) == (["warning: 2 rows", "read"], [])
    logger.warning("later")
    assert (len(lines), [record.getMessage() for record in caplog.records]) == (2, ["later"])


@pytest.mark.parametrize("section", ["supervised", "warm_start"])
def test_errors_of_turns_name_the_key_of_their_section(tmp_path: Path, section: str) -> None:
    """A template that marks an answer only where it ends the conversation."""
    folder = build_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '=' if loop.last and m.role == 'assistant' else '' }}{{ m.content }}{% endfor %}"
    )
    roles = ("user", "assistant", "user", "assistant")
    chat = write(tmp_path, "chat", {"messages": [{"role": role, "content": "2"} for role in roles]})
    model = ModelConfig(path=str(folder))
    supervised, warm_start = FineTuningConfig(files=(chat,)), SupervisedConfig(steps=1, files=(chat,))
    loads: dict[str, Callable[[], object]] = {
        "warm_start": lambda: load_ahead(InputsConfig(model=model), warm_start, seed=1),
        "supervised": lambda: _load(SupervisedJobConfig(model=model, supervised=supervised), tmp_path),
    }
    with raises(InputError, field=f"{section}.files") as caught:
        loads[section]()
    assert all(part in str(caught.value) for part in ("line 1", f"({section}.turns=each)", f"({section}.turns=last)"))


def test_tokens_without_a_row_in_the_model_are_refused(tmp_path: Path) -> None:
    """A tokenizer may have more tokens than the model, as long as no prompt and no example uses them."""
    folder = build_tiny_model(tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    plain = write(tmp_path, "plain", {"prompt": "2+3", "ground_truth": "5"})
    used = write(tmp_path, "used", {"prompt": "2+3", "ground_truth": "5"}, {"prompt": "<tool>2", "ground_truth": "2"})
    examples = write(tmp_path, "examples", {"prompt": "2", "response": "<tool>"})
    model = ModelConfig(path=str(folder))

    def load(train: str, files: tuple[str, ...] = ()) -> object:
        supervised = SupervisedConfig(steps=len(files), files=files)
        return load_ahead(InputsConfig(model=model, data=DataConfig(train=(train,))), supervised, seed=1)

    assert load(plain) is not None
    with raises(InputError, field="data.train") as caught:
        load(used)
    assert "used:2 has the token '<tool>'" in caught.value.problem
    with raises(InputError, field="warm_start.files"):
        load(plain, (examples,))
