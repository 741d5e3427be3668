"""Bad input is refused with a clear error and exit code 2 before any process starts."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

REPO = Path(__file__).resolve().parents[1]


def run_app(tmp_path: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "apps.grpo.main", f"trainer.output_dir={tmp_path / 'outputs'}", *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
    )


def refuse(tmp_path: Path, *arguments: str) -> str:
    """Runs the app, asserts the refusal, and gives the message."""
    result = run_app(tmp_path, arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "outputs").exists(), "a run folder was made before the input was checked"
    return result.stderr


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model folder without a tokenizer, as far as a check before loading can tell."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"")
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_parquet(path: Path, columns: dict[str, list[str | None]]) -> Path:
    pq.write_table(pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}), path)
    return path


def test_missing_parquet(tmp_path: Path, model_folder: Path) -> None:
    (model_folder / "tokenizer.json").write_text("{}")
    message = refuse(tmp_path, f"model.path={model_folder}", f"data.train={tmp_path / 'nowhere.parquet'}")
    assert "nowhere.parquet" in message


def test_empty_parquet(tmp_path: Path, model_folder: Path) -> None:
    (model_folder / "tokenizer.json").write_text("{}")
    file = write_parquet(tmp_path / "empty.parquet", {"question": [], "answer": []})
    assert "empty.parquet" in refuse(tmp_path, f"model.path={model_folder}", f"data.train={file}")


def test_missing_column_names_those_found(tmp_path: Path, model_folder: Path) -> None:
    (model_folder / "tokenizer.json").write_text("{}")
    file = write_parquet(tmp_path / "train.parquet", {"question": ["a"], "solution": ["#### 1"]})
    message = refuse(tmp_path, f"model.path={model_folder}", f"data.train={file}")
    assert "answer" in message
    assert "solution" in message


def test_row_without_answer(tmp_path: Path, model_folder: Path) -> None:
    (model_folder / "tokenizer.json").write_text("{}")
    file = write_parquet(tmp_path / "train.parquet", {"question": ["a", "b"], "answer": ["#### 1", "no answer here"]})
    message = refuse(tmp_path, f"model.path={model_folder}", f"data.train={file}")
    assert "row" in message


def test_model_folder_without_tokenizer(tmp_path: Path, model_folder: Path) -> None:
    file = write_parquet(tmp_path / "train.parquet", {"question": ["a"], "answer": ["#### 1"]})
    message = refuse(tmp_path, f"model.path={model_folder}", f"data.train={file}")
    assert "tokenizer" in message


def test_batch_that_the_ranks_cannot_divide_says_what_would_do(tmp_path: Path) -> None:
    message = refuse(tmp_path, "batch.train_batch_size=3", "batch.mini_batch_size=3", "sampling.n=3")
    assert "mini_batch_size" in message
    assert any(size in message for size in ("2", "4")), message


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refuse(tmp_path, f"rollout.port={port}")
    assert str(port) in message


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    message = refuse(tmp_path, "actor.zero.stag=2")
    assert "actor.zero.stage" in message


def test_wrong_type(tmp_path: Path) -> None:
    message = refuse(tmp_path, "actor.zero.stage=two")
    assert "actor.zero.stage" in message
    assert "two" in message


def test_too_little_memory_for_the_kv_cache(tmp_path: Path) -> None:
    # 2 layers x 2 KV heads x 32 x 4 bytes x (K and V) is 1 KiB a token: 512 tokens need 0.0005 GiB.
    message = refuse(tmp_path, "rollout.max_model_len=512", "rollout.kv_cache_gib=0.0001")
    assert "kv_cache" in message


def test_help_is_quick_and_does_not_import_torch() -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['apps.grpo.main', '--help']\n"
        "try:\n    runpy.run_module('apps.grpo.main', run_name='__main__')\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'deepspeed', 'vllm', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "actor.zero.stage" in result.stdout
    # The target is one second on an idle machine; the bound here only catches a heavy import.
    assert time.monotonic() - start < 10
