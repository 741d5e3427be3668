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
