"""Bad input is refused with a clear error and exit code 2 before any process starts."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plinth_testing import run_script

pytestmark = pytest.mark.xdist_group("grpo_bad_input")  # one process imports the stack for all cases
REPO = Path(__file__).resolve().parents[1]
MODEL = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1}
FILES: dict[str, dict[str, list[str]]] = {
    "empty": {"question": [], "answer": []},
    "other_column": {"question": ["a"], "solution": ["#### 1"]},
    "no_answer": {"question": ["a", "b"], "answer": ["#### 1", "no answer here"]},
    "good": {"question": ["a"], "answer": ["#### 1"]},
}
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "missing parquet file": ("model.path=WITH data.train=nowhere.parquet", ("nowhere.parquet",)),
    "empty parquet file": ("model.path=WITH data.train=empty.parquet", ("empty.parquet",)),
    "missing column": ("model.path=WITH data.train=other_column.parquet", ("answer", "solution")),
    "row without an answer": ("model.path=WITH data.train=no_answer.parquet", ("row",)),
    "model folder without a tokenizer": ("model.path=WITHOUT data.train=good.parquet", ("tokenizer",)),
    "batch that ranks cannot divide": (
        "trainer.num_ranks=2 batch.train_batch_size=3 batch.mini_batch_size=3 sampling.n=3",
        ("batch.mini_batch_size=3 prompts x 3 samples", "that works: 2, 4", "another trainer.num_ranks (2)"),
    ),
    "model without data": ("model.path=WITH", ("data.train is empty", "model.path=builtin:tiny")),
    "attention that needs a GPU": (
        "trainer.device=cpu actor.attention=flash4",
        ("actor.attention is flash4", "allowed: auto, sdpa"),
    ),
    "port in use": ("rollout.port=PORT", ("error: rollout.port=PORT on 127.0.0.1",)),
    "section that is a list": ("data=[1]", ("data: got [1]; allowed: a section with the keys train, val",)),
    "reward module that ends the process": ("reward.function=quits:score", ("reward.function", "quits", "SystemExit")),
    "reward module that does not parse": ("reward.function=broken:score", ("reward.function", "broken", "SyntaxError")),
    "model that cannot be trained": ("model.path=BERT data.train=good.parquet", ("BertLMHeadModel cannot be trained",)),
    "prompts that are numbers": ("model.path=WITH data.train=numbers.parquet", ("data.train", "row 0", "'question'")),
    "a line of JSON lines without an answer": (
        "model.path=WITH data.train=lines.jsonl",
        (
            "data.train",
            "lines.jsonl: line 12346, column 'answer': there is no ground truth",
        ),
    ),
    "a column of CSV that is missing": (
        "model.path=WITH data.train=lines.csv data.columns.prompt=text reward.method=flexible",
        ("column 'text' is missing; the columns found are question, answer", "data.columns.prompt"),
    ),
    "a saved data set without its split": (
        "model.path=WITH data.train=saved",
        ("say which of its splits", "saved:train"),
    ),
    "unknown key": ("actor.zero.stag=2", ("actor.zero.stage",)),
    "wrong type": ("actor.zero.stage=two", ("actor.zero.stage", "two")),
    # 2 layers x 2 KV heads x 32 x 4 bytes x (K and V) is 1 KiB per token: 512 tokens need 0.0005 GiB.
    "too little memory for the KV cache": (
        "rollout.max_model_len=512 rollout.kv_cache_gib=0.0001",
        ("error: rollout.kv_cache_gib=0.0001",),
    ),
}
"""By name: the arguments, and what the message has to hold."""
RUN_ALL = """
import json, os, sys
import pyarrow.parquet, ray, rl_runtime.launch.session, transformers  # once: every case is a fork of this process
import apps.grpo.main

codes = {}
for name, arguments in json.loads(sys.argv[1]).items():
    if pid := os.fork():
        codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    else:
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 2)
        apps.grpo.main.cli(arguments)
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that look whole to a check before loading, with and without a tokenizer, and data files."""
    folder = tmp_path_factory.mktemp("bad_input")
    for name in ("with", "without"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"")
        (folder / name / "config.json").write_text(json.dumps(MODEL))
    (folder / "with" / "tokenizer.json").write_text("{}")
    (folder / "bert").mkdir()
    (folder / "bert" / "model.safetensors").write_bytes(b"")
    (folder / "bert" / "tokenizer.json").write_text("{}")
    bert = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    (folder / "bert" / "config.json").write_text(json.dumps(bert))
    (folder / "quits.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "broken.py").write_text("def score(:\n")
    pq.write_table(pa.table({"question": [1], "answer": ["#### 1"]}), folder / "numbers.parquet")
    for name, columns in FILES.items():
        table = {column: pa.array(values, pa.string()) for column, values in columns.items()}
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    line = json.dumps({"question": "a", "answer": "#### 1"}) + "\n"
    (folder / "lines.jsonl").write_text(line * 12_345 + line.replace("#### 1", "") + line)
    (folder / "lines.csv").write_text("question,answer\na,#### 1\n")
    (folder / "saved").mkdir()
    (folder / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return folder


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


@pytest.fixture(scope="module")
def codes(folder: Path, port: str) -> dict[str, int]:
    """Exit codes of all cases; the messages are in files of their names."""
    values = {
        "WITHOUT": str(folder / "without"),
        "BERT": str(folder / "bert"),
        "WITH": str(folder / "with"),
        "PORT": port,
    }
    cases = {}
    for name, (arguments, _) in REFUSED.items():
        for word, value in values.items():
            arguments = arguments.replace(word, value)
        arguments = arguments.replace("data.train=", f"data.train={folder}/")
        cases[name] = [f"trainer.output_dir={folder / 'outputs'}", *arguments.split()]
    script = folder / "run_all.py"
    script.write_text(f"import os\nos.chdir({str(folder)!r})\n" + RUN_ALL)
    paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    printed = run_script(script, json.dumps(cases), env={"PYTHONPATH": os.pathsep.join(paths)})
    found: dict[str, int] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", REFUSED)
def test_refused(folder: Path, port: str, codes: dict[str, int], case: str) -> None:
    message = (folder / case).read_text()
    assert codes[case] == 2, message
    assert "Traceback" not in message
    assert not (folder / "outputs").exists(), "a run folder was made before the input was checked"
    assert [word for word in REFUSED[case][1] if word.replace("PORT", port) not in message] == []


def cpu_s() -> float:
    """CPU seconds of ended child processes: unlike the wall time, those of a busy machine are the same."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_is_quick_and_does_not_import_torch() -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['apps.grpo.main', '--help']\n"
        "try:\n    runpy.run_module('apps.grpo.main', run_name='__main__')\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'deepspeed', 'vllm', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    before = cpu_s()
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "actor.zero.stage" in result.stdout
    # The target is one second on an idle machine; the bound here only catches a heavy import.
    assert cpu_s() - before < 5
