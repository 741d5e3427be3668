"""docs/recipes begin with commands that load and fit; docs/troubleshooting.md quotes messages that are printed."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import torch

from apps.grpo.config import GrpoConfig
from benchmarks.random_model import CONFIGS
from ds_engine import EngineConfig, EngineConfigError, ModelShape, ZeroConfig, check_deepspeed
from ds_engine.guard import collective_log as guard
from rl_runtime import InputError, PlacementError
from rl_runtime.launch.gpus import Gpu
from rl_runtime.ranks.environment import gpu_ids, visible_gpus
from rl_runtime.resolve.job import resolve_job_for
from rollout_vllm import ServerDiedError, ServerStartError
from rollout_vllm.servers import diagnose as servers
from rollout_vllm.servers.watch import EventKind
from run_kit import load_config

REPO = Path(__file__).resolve().parents[1]
QUOTED = (REPO / "docs" / "troubleshooting.md").read_text()
QWEN2_7B = ModelShape.read(CONFIGS["qwen2-7b"])


def cards(number: int, gib: float, capability: tuple[int, int]) -> tuple[Gpu, ...]:
    return (Gpu(name="card", total_bytes=int(gib * 2**30), used_bytes=0, capability=capability),) * number


def config_of(command: str) -> GrpoConfig:
    """The configuration of `plinth grpo preset=NAME key=value ...`."""
    program, app, *arguments = shlex.split(command)
    assert (program, app) == ("plinth", "grpo")
    names = [argument.removeprefix("preset=") for argument in arguments if argument.startswith("preset=")]
    presets = [REPO / "apps" / "grpo" / "presets" / f"{name}.yaml" for name in names]
    return load_config(GrpoConfig, presets=presets, overrides=[a for a in arguments if not a.startswith("preset=")])


@pytest.mark.parametrize(
    ("recipe", "gpus"),
    [
        ("two_11gb", cards(2, 11, (7, 5))),
        ("two_24gb", cards(2, 24, (8, 6))),
        ("eight_80gb", cards(8, 80, (9, 0))),
    ],
)
def test_a_recipe_begins_with_a_command_that_fits(recipe: str, gpus: tuple[Gpu, ...]) -> None:
    text = (REPO / "docs" / "recipes" / f"{recipe}.md").read_text()
    match = re.match(r"# .*\n\n```\n(.*)\n```\n", text)
    assert match is not None, "the page begins with one command"
    choice = resolve_job_for(config_of(match[1]), gpus=gpus, shape=QWEN2_7B)
    assert choice.config.trainer.rank_count == len(gpus)
    assert choice.gpu_bytes <= 0.97 * gpus[0].total_bytes
    assert "run out of memory" not in choice.memory


def provoke(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "duplicate":
        gpu_ids(["0", "0"], [])
    elif kind == "slurm":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "21000,21001")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        visible_gpus()
    elif kind == "memory":
        resolve_job_for(config_of("plinth grpo"), gpus=cards(2, 11, (8, 6)), shape=QWEN2_7B)
    elif kind == "key":
        check_deepspeed(EngineConfig(zero=ZeroConfig(stage=3, deepspeed={"stage3_max_live_parameter": 1})))
    else:
        given = config_of("plinth grpo actor.dtype=bfloat16")
        resolve_job_for(given, gpus=cards(2, 24, (7, 5)), shape=QWEN2_7B)


@pytest.mark.parametrize("kind", ["duplicate", "slurm", "memory", "key", "dtype"])
def test_quoted_messages_are_those_printed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((PlacementError, InputError, EngineConfigError)) as caught:
        provoke(kind, monkeypatch)
    message = str(caught.value)
    blocks = re.findall(r"^```\n(.*?)\n```$", QUOTED, re.MULTILINE | re.DOTALL)
    assert any(block in message for block in blocks), message


def texts(tree: ast.AST) -> Iterator[str]:
    """The strings of a module without statements that are strings (docstrings); placeholders are `…`."""
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        return
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        yield "".join(next(texts(side), "…") for side in (tree.left, tree.right))
    elif isinstance(tree, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in tree.values)
    elif isinstance(tree, ast.Constant) and isinstance(tree.value, str | bytes):
        yield tree.value if isinstance(tree.value, str) else tree.value.decode("latin-1")
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(tree, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from texts(child)


def dump(rank: int, *operations: str) -> guard.RankDump:
    """The collectives of a rank."""
    records = [
        guard.CollectiveRecord(index=i, operation=op, dtype="", num_elements=1, site="")
        for i, op in enumerate(operations)
    ]
    return guard.RankDump(rank=rank, count=len(records), records=tuple(records), idle_s=1.0, position="")


@cache
def messages() -> str:
    """The strings of all packages and apps, one in each line, and messages that are put together from several."""
    files = [file for folder in ("packages", "apps") for file in (REPO / folder).rglob("*.py")]
    sources = [f for f in files if "plinth_testing" not in f.parts and "tests" not in f.parts]
    found = [text for file in sources for text in texts(ast.parse(file.read_text(encoding="utf-8")))]
    found += [str(error("…", 0, Path("…"))) for error in (ServerStartError, ServerDiedError)]
    found += [f"rollout server 0 {event.replace('_', ' ')}: …" for event in get_args(EventKind)]
    for line in (
        "Free memory on device is less than desired GPU memory utilization",
        "No available memory for the cache",
    ):
        found.append(servers.diagnose(f"ValueError: {line} blocks", None))
    same, first, other = (dump(rank, *ops) for rank, ops in enumerate((("sum",), ("sum", "max"), ("min",))))
    for dumps in ((same, other), (same,), (same, first)):  # they diverge, one is silent, one is behind
        found.append(guard.diagnose("dp", [0, 1], {each.rank: each for each in dumps})[0])
    return "\n".join(text.replace("\n", " ") for text in found)


def is_printed(quoted: str) -> bool:
    """Whether one string has all parts of `quoted`, in their order; `…` in it stands for any text.

    The sentence of an error with fields, `rollout.port: got …; problem; remedy`, has one string for each part.
    """
    parts = [re.escape(part.strip(" :;(),")) for part in quoted.split("…")]
    if any(parts) and re.search(".*".join(filter(None, parts)), messages()) is not None:
        return True
    head, colon, rest = quoted.partition(": ")
    sentences = [part for part in rest.split("; ") if not part.startswith("got ")]
    return bool(colon and re.fullmatch(r"[\w.…]+", head) and sentences) and all(map(is_printed, sentences))


ENTRIES = [" ".join(quoted.split()) for quoted in re.findall(r"\*\*`([^`]+)`\*\*", QUOTED)]


@pytest.mark.parametrize("quoted", ENTRIES)
def test_an_entry_quotes_a_message_of_the_code(quoted: str) -> None:
    assert len(re.sub(r"\W", "", quoted)) >= 6, f"`{quoted}` says too little to be found"
    assert is_printed(quoted), f"no message of a package or app has the words of `{quoted}`"


def test_there_are_entries_and_a_reworded_message_is_seen() -> None:
    assert len(ENTRIES) > 70
    assert is_printed("ranks … of … did not finish … in … s")
    assert not is_printed("ranks … of … have not finished … in … s")
