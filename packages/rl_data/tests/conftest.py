"""The tiny model and its tokenizer, for tests that only read them."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rl_data import build_tiny_model, load_tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # rl_data_rows


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(model_folder: Path) -> Any:
    """A tokenizer of its own for each test, which may change it."""
    return load_tokenizer(model_folder)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """One token per byte and three special ones; `<|im_end|>` ends sequences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
