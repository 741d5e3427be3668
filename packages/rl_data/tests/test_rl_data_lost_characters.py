"""Characters that a tokenizer loses are said; what tokenizers normalize is not."""

import copy
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_data_rows import write_lines

from rl_data import DataConfig, load_demonstrations, load_pairs, load_prompts
from rl_data.lost_characters import LostCharacters, compared

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
MARKED = "{% for m in messages %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"


@cache
def byte_level(missing: str = "") -> Any:
    """A token for each byte but the first one of each of these characters, which it drops, as that of SmolLM2 does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    dropped = {pre.pre_tokenize_str(one)[0][0][0] for one in missing}
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - dropped)
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<|im_start|>")


@cache
def normalizing() -> Any:
    """Lowercase NFKC pieces with a mark for spaces, and bytes for what it has no piece for, as sentencepiece does."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "</s>", *(f"<0x{index:02X}>" for index in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    pieces = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip(), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def lost(tokenizer: Any, text: str) -> Counter[str]:
    [ids] = tokenizer([text], add_special_tokens=False)["input_ids"]
    return LostCharacters(tokenizer).lost(text, ids)


TEXTS = st.text(max_size=40).map(lambda text: text.replace("▁", ""))


@pytest.mark.parametrize("make", [byte_level, normalizing])
@given(text=TEXTS)
def test_what_tokenizers_normalize_is_not_lost(make: Any, text: str) -> None:
    assert lost(make(), text) == Counter()


@given(text=TEXTS, dropped=st.text(alphabet="\x04\x1d\U00050000", max_size=3))
def test_every_character_without_a_token_is_lost(text: str, dropped: str) -> None:
    assert lost(byte_level("\x04\x1d\U00050000"), text + dropped + text) >= compared(dropped)


def test_words_without_a_token_are_lost_and_its_name_is_none_of_their_letters(tokenizer: Any) -> None:
    assert lost(tokenizer, "3 knurls. 4") == Counter("knurls")


GOOD = {"question": "Größe? 🙂", "answer": "yes #### 1", "chosen": "yes", "rejected": "no"}
TALK = {"messages": [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "yes"}]}
BAD_TALK = {"messages": [TALK["messages"][0], {"role": "assistant", "content": "y\x04es\x04"}]}


@pytest.mark.parametrize(
    ("load", "rows", "column", "template"),
    [
        (load_prompts, [GOOD, {**GOOD, "question": "a\x04b\x04"}, GOOD], "question", None),
        (load_prompts, [GOOD, {**GOOD, "question": "a\x04b\x04"}, GOOD], "question", TEMPLATE),
        (load_demonstrations, [GOOD, {**GOOD, "question": "a\x04b\x04"}, GOOD], "question", TEMPLATE),
        (load_demonstrations, [GOOD, {**GOOD, "answer": "a\x04b\x04 #### 1"}, GOOD], "answer", None),
        (load_demonstrations, [TALK, BAD_TALK], "messages", TEMPLATE),
        (load_demonstrations, [TALK, BAD_TALK], "messages", MARKED),
        (load_demonstrations, [{"text": "a"}, {"text": "a\x04b\x04"}], "text", None),
        (load_pairs, [GOOD, {**GOOD, "rejected": "a\x04b\x04"}], "rejected", None),
    ],
)
def test_one_line_names_the_row_the_column_and_the_characters(
    load: Any,
    rows: list[dict[str, Any]],
    column: str,
    template: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file, tokenizer = write_lines(tmp_path / "rows.jsonl", rows), copy.copy(byte_level("\x04"))
    tokenizer.chat_template = template
    assert len(load([file], tokenizer, DataConfig())) == len(rows), "no row is refused"
    [line] = [record.getMessage() for record in caplog.records if record.name == "rl_data.lost_characters"]
    assert "1 row," in line
    assert "'\\x04' (2)" in line
    assert f"rows.jsonl: line 2, column {column!r}" in line


def test_rows_whose_characters_all_have_tokens_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, decoded = copy.copy(byte_level("\x04")), list[Any]()
    plain = tokenizer.decode

    def decode(ids: Any, **options: Any) -> str:
        decoded.append(ids)
        return str(plain(ids, **options))

    monkeypatch.setattr(tokenizer, "decode", decode)
    file = write_lines(tmp_path / "rows.jsonl", [{**GOOD, "question": f"Größe {index}? 🙂"} for index in range(500)])
    assert len(load_prompts([file], tokenizer, DataConfig())) == 500
    assert len(decoded) == len(set("Größe 0123456789? 🙂\n"))
    assert [record for record in caplog.records if record.name == "rl_data.lost_characters"] == []
