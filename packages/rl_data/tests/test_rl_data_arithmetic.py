import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from plinth_testing import raises
from rl_data import (
    DataConfig,
    DataConfigError,
    RewardConfig,
    TaskFiles,
    build_tiny_model,
    check_demonstrations,
    check_files,
    gsm8k_score,
    load_demonstrations,
    load_tokenizer,
    write_task,
)
from rl_data.tasks.arithmetic import WORKING_SHARE, WRONG_SHARE, working


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    return write_task(tmp_path_factory.mktemp("task"), num_train=1100, num_val=300, num_demonstrations=2000, seed=3)


def _rows(path: Path) -> list[dict[str, str]]:
    return pq.read_table(path).to_pylist()


def _pair(question: str) -> tuple[int, int]:
    x, y = (int(number) for number in re.findall(r"\d+", question))
    return (min(x, y), max(x, y))


def test_files_are_gsm8k_parquet(task: TaskFiles) -> None:
    assert check_files([task.train, task.val, task.demonstrations]) == 3400
    assert pq.read_schema(task.train).names == ["question", "answer"]


def test_answers_are_right_and_score(task: TaskFiles) -> None:
    for row in _rows(task.train) + _rows(task.val):
        x, y = _pair(row["question"])
        assert 1 <= x <= y <= 50
        assert gsm8k_score(row["answer"], str(x + y), RewardConfig()) == 1.0
    for x in range(1, 51):
        for y in range(1, 51):
            ones, tens, answer = working(x, y).split("\n")
            for line in (ones, tens):
                left, right = line.split(" = ")
                assert sum(map(int, left.split(" + "))) == int(right)
            assert answer == f"#### {x + y}"


def test_validation_pairs_do_not_occur_in_other_files(task: TaskFiles) -> None:
    held_out = {_pair(row["question"]) for row in _rows(task.val)}
    known = {_pair(row["question"]) for row in _rows(task.train) + _rows(task.demonstrations)}
    assert not held_out & known
    assert len(held_out) + len(known) == 50 * 51 // 2


def test_shares_of_demonstration_styles(task: TaskFiles) -> None:
    rows = _rows(task.demonstrations)
    shown = [row for row in rows if "\n" in row["answer"]]
    jumps = [row for row in rows if "\n" not in row["answer"]]
    assert len(shown) / len(rows) == pytest.approx(WORKING_SHARE, abs=0.04)
    assert all(gsm8k_score(row["answer"], str(sum(_pair(row["question"]))), RewardConfig()) for row in shown)
    wrong = [row for row in jumps if not gsm8k_score(row["answer"], str(sum(_pair(row["question"]))), RewardConfig())]
    assert len(wrong) / len(jumps) == pytest.approx(WRONG_SHARE, abs=0.04)


def test_same_seed_same_rows(tmp_path: Path, task: TaskFiles) -> None:
    again = write_task(tmp_path, num_train=1100, num_val=300, num_demonstrations=2000, seed=3)
    for name in ("train", "val", "demonstrations"):
        assert _rows(getattr(task, name)) == _rows(getattr(again, name))
    other = write_task(tmp_path, num_train=1100, num_val=300, num_demonstrations=2000, seed=4)
    assert _rows(task.train) != _rows(other.train)


def test_bad_count(tmp_path: Path) -> None:
    with raises(DataConfigError, field="num_val", value=0):
        write_task(tmp_path, num_val=0)


def test_texts_round_trip(task: TaskFiles, model_folder: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    for path in (task.train, task.val, task.demonstrations):
        for row in _rows(path)[:200]:
            for text in (row["question"] + "\n", row["answer"], row["question"] + "\n" + row["answer"]):
                ids = tokenizer(text).input_ids
                assert tokenizer.unk_token_id not in ids
                assert tokenizer.decode(ids) == text
    ids = tokenizer("#### 72").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["####", "7", "2"]
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "#### 72"


def test_calculator_demonstrations_mask_the_tool_output(tmp_path: Path, model_folder: Path) -> None:
    task = write_task(tmp_path, kind="calculator", num_train=50, num_val=20, num_demonstrations=200, seed=3)
    assert check_files([task.train, task.val]) == 70
    assert check_demonstrations([task.demonstrations]) == 200
    tokenizer = load_tokenizer(model_folder)
    demonstrations = load_demonstrations([task.demonstrations], tokenizer, DataConfig(max_prompt_length=64))
    with_tool = 0
    for row, demonstration in zip(_rows(task.demonstrations), demonstrations, strict=True):
        ids, mask = demonstration.response_ids, demonstration.response_mask
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.unk_token_id not in ids
        if len(row["answer"]) == 1:
            assert mask is None
            continue
        with_tool += 1
        assert mask is not None
        x, y = _pair(row["question"])
        given = [token for token, own in zip(ids, mask, strict=True) if not own]
        assert tokenizer.decode(given) == f"{x + y}\n"
        assert tokenizer.convert_ids_to_tokens(ids[mask.index(False) - 1]) == "<result>"
        assert f"#### {x + y}" in tokenizer.decode(ids)
    assert with_tool / 200 == pytest.approx(WORKING_SHARE, abs=0.1)


def test_every_id_decodes_and_encodes_back(model_folder: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    assert len(tokenizer) == 64
    for token in range(64):
        assert tokenizer(tokenizer.decode([token])).input_ids == [token]
    assert tokenizer("Zebra").input_ids == [tokenizer.unk_token_id]


def test_tiny_model_loads_and_depends_only_on_the_seed(model_folder: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == 402176
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = torch.random.get_rng_state()
    same = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path / "same", seed=0))
    assert torch.equal(torch.random.get_rng_state(), before)
    other = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path / "other", seed=6))
    assert torch.equal(same.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)
    tokens = load_tokenizer(model_folder)(["Tom has 3 apples"], return_tensors="pt").input_ids
    assert model(tokens).logits.shape == (1, 4, 64)
