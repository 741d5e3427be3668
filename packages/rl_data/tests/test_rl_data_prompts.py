import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plinth_base import ModelFolderError
from plinth_testing import raises
from rl_data import (
    DataConfig,
    DataConfigError,
    DataError,
    check_files,
    load_demonstrations,
    load_prompts,
    load_tokenizer,
)

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have now?"
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _gsm8k(path: Path, rows: list[tuple[str | None, str | None]], **more: Any) -> Path:
    pq.write_table(pa.table({"question": [row[0] for row in rows], "answer": [row[1] for row in rows], **more}), path)
    return path


def _verl(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def _verl_row(**change: Any) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": QUESTION}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 0},
        **change,
    }


def test_gsm8k_schema(tmp_path: Path, tokenizer: Any) -> None:
    file = _gsm8k(tmp_path / "a.parquet", [(QUESTION, "so\n#### 1,007"), ("Ben has 2 pens.", "#### $5 ")])
    assert check_files([file]) == 2
    first, second = load_prompts([file], tokenizer, DataConfig())
    assert first.id == "a:0"
    assert first.text == QUESTION + "\n"
    assert tokenizer.decode(first.token_ids) == first.text
    assert (first.ground_truth, second.ground_truth) == ("1007", "5")
    assert first.data_source == "openai/gsm8k"


def test_verl_schema(tmp_path: Path, tokenizer: Any) -> None:
    conversation = [{"role": "system", "content": "in"}, {"role": "user", "content": "box"}]
    rows = [_verl_row(), _verl_row(data_source="other", prompt=conversation)]
    file = _verl(tmp_path / "v.parquet", rows)
    with raises(DataError, row=1, column="data_source"):
        check_files([file])  # no scoring function is registered for it
    first, second = load_prompts([file], tokenizer, DataConfig(system_prompt="all", instruction="now"))
    assert first.text == f"all\n{QUESTION}\n", "the instruction belongs to GSM8K rows only"
    assert (first.ground_truth, first.data_source) == ("7", "openai/gsm8k")
    assert second.text == "in\nbox\n", "a system message in the row is kept"
    assert second.data_source == "other"


def test_several_files_have_unique_ids(tmp_path: Path, tokenizer: Any) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    files = [
        _gsm8k(tmp_path / "x" / "train.parquet", [(QUESTION, "#### 7")] * 2),
        _verl(tmp_path / "y" / "train.parquet", [_verl_row()]),
        _gsm8k(tmp_path / "z.parquet", [(QUESTION, "#### 7")], data_source=["mine"]),
    ]
    prompts = load_prompts(files, tokenizer, DataConfig())
    assert [prompt.id for prompt in prompts] == ["train~0:0", "train~0:1", "train~1:0", "z:0"]
    assert prompts[-1].data_source == "mine"
    assert load_prompts(files, tokenizer, DataConfig(), max_prompts=3) == prompts[:3]


def test_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    file = _gsm8k(tmp_path / "a.parquet", [("box", "#### 7")])
    with raises(DataError):
        load_prompts([file], tokenizer, DataConfig(chat_template="always"))
    tokenizer.chat_template = CHAT_TEMPLATE
    config = DataConfig(system_prompt="all", question_template="so {question}", instruction="now")
    (prompt,) = load_prompts([file], tokenizer, config)
    assert prompt.text == "<system>all\n<user>so box now\n<assistant>"
    (plain,) = load_prompts([file], tokenizer, DataConfig(chat_template="never"))
    assert plain.text == "box\n"


def test_overlong(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    file = _gsm8k(tmp_path / "a.parquet", [("box " * 9, "#### 1"), ("box", "#### 2"), ("box " * 8, "#### 3")])
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts([file], tokenizer, DataConfig(max_prompt_length=9))
    assert [prompt.id for prompt in prompts] == ["a:1", "a:2"]
    assert "1 of 3 prompts" in caplog.text
    with raises(DataError, row=0, setting="data.overlong=filter"):
        load_prompts([file], tokenizer, DataConfig(max_prompt_length=9, overlong="refuse"))
    with raises(DataError, file=str(file), row=None):
        load_prompts([file], tokenizer, DataConfig(max_prompt_length=1))


def test_a_bad_file_is_named_and_an_empty_list_refused(tmp_path: Path, tokenizer: Any) -> None:
    good = _gsm8k(tmp_path / "good.parquet", [(QUESTION, "#### 7")])
    (tmp_path / "broken.parquet").write_text("question,answer\n")
    for file in (tmp_path / "none.parquet", tmp_path / "broken.parquet"):
        with raises(DataError, file=str(file), row=None):
            load_prompts([good, file], tokenizer, DataConfig())
    for load in (load_prompts, load_demonstrations):
        with raises(DataError, file=None):
            load([], tokenizer, DataConfig())


@pytest.mark.parametrize(
    ("columns", "missing"),
    [
        ({"question": ["q"], "solution": ["s"]}, "answer"),
        ({"answer": ["#### 1"], "problem": ["p"]}, "question"),
        ({"text": ["t"]}, "prompt"),
        ({"prompt": ["p"], "data_source": ["gsm8k"]}, "reward_model"),
        ({"prompt": ["p"], "reward_model": [{"ground_truth": "1"}]}, "data_source"),
    ],
)
def test_missing_column(tmp_path: Path, columns: dict[str, Any], missing: str) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), file)
    with raises(DataError, column=missing, row=None) as caught:
        check_files([file])
    assert caught.value.problem.endswith(f"the columns found are {', '.join(columns)}")


def test_reward_model_without_ground_truth_field(tmp_path: Path) -> None:
    file = _verl(tmp_path / "a.parquet", [_verl_row(reward_model={"style": "rule"})])
    with raises(DataError, row=0, column="reward_model", setting="data.columns.ground_truth"):
        check_files([file])


def test_demonstrations(tmp_path: Path, tokenizer: Any) -> None:
    file = _gsm8k(tmp_path / "a.parquet", [("box " * 30, "#### 1"), (QUESTION, "3 + 4 = 7\n#### 7")])
    (demonstration,) = load_demonstrations([file], tokenizer, DataConfig(max_prompt_length=25))
    (prompt,) = load_prompts([file], tokenizer, DataConfig(max_prompt_length=25))
    assert demonstration.prompt_ids == prompt.token_ids
    assert demonstration.response_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(demonstration.response_ids[:-1]) == "3 + 4 = 7\n#### 7"
    bad = _gsm8k(tmp_path / "b.parquet", [(QUESTION, "#### 7"), (QUESTION, None)])
    with raises(DataError, row=1, column="answer"):
        load_demonstrations([bad], tokenizer, DataConfig())
    with raises(DataError, row=None, column="question"):
        load_demonstrations([_verl(tmp_path / "v.parquet", [_verl_row()])], tokenizer, DataConfig())


def test_a_tokenizer_that_cannot_be_loaded(tmp_path: Path, model_folder: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with raises(ModelFolderError, value=str(folder)):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with raises(ModelFolderError, value=str(folder)):
        load_tokenizer(folder)


def test_tokenizer_without_end_of_sequence(tmp_path: Path, model_folder: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with raises(ModelFolderError, value=str(folder)):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("overlong", "cut"),
        ("chat_template", "yes"),
        ("max_prompt_length", 0),
        ("max_val_prompts", 0),
        ("question_template", "answer!"),
    ],
)
def test_bad_config(field: str, value: Any) -> None:
    with raises(DataConfigError, field=field, value=value):
        DataConfig(**{field: value})


def test_checks_import_nothing_heavy(tmp_path: Path) -> None:
    file = _gsm8k(tmp_path / "a.parquet", [(QUESTION, "#### 7")])
    code = (
        "import sys, rl_data\n"
        f"rl_data.check_files([{str(file)!r}])\n"
        "rl_data.DataConfig(), rl_data.RewardConfig(), rl_data.PromptSampler(3), rl_data.reward_for('gsm8k')\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules), 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
