"""Markdown files of the repository: links and anchors exist, code blocks parse, every config key is documented."""

import ast
import importlib
import subprocess
from pathlib import Path

import pytest

from run_kit import reference_text
from run_kit.config.schema import Key, entries
from scripts.markdown_links import anchors, code_blocks, slug, targets

REPO = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "packages", "benchmarks")
FILES = [
    *sorted(path for folder in FOLDERS for path in (REPO / folder).rglob("*.md")),
    *(REPO / "README.md", REPO / "CONTRIBUTING.md"),
]
CONFIGS = (
    *("apps.grpo.config:GrpoConfig", "apps.ppo.config:PpoConfig", "apps.sft.config:SftConfig"),
    *("apps.evaluate.config:EvaluateConfig", "apps.forecast.config:ForecastConfig", "apps.bench.config:SixCaseConfig"),
    *("apps.bench.config:StageGateConfig", "apps.bench.config:AlgorithmsConfig", "apps.distill.config:DistillConfig"),
    *("apps.reward.config:RewardConfig", "apps.dpo.config:DpoConfig"),
)


def name(file: Path) -> str:
    return str(file.relative_to(REPO))


@pytest.mark.parametrize("file", FILES, ids=name)
def test_links_name_files_and_anchors_that_exist(file: Path) -> None:
    for link, path, anchor in targets(file):
        assert path.exists(), f"{name(file)}: no file for the link {link}"
        if anchor:
            assert path.suffix == ".md", f"{name(file)}: {link} has an anchor in a file without headings"
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{name(file)}: no heading for {link}"


def test_a_broken_link_and_a_broken_anchor_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n[a](gone.md) [b](#one) [c](#two) [d](https://example.org) `[e](code.md)`\n")
    found = {link: (path.exists(), anchor in anchors(page.read_text())) for link, path, anchor in targets(page)}
    assert found == {"gone.md": (False, False), "#one": (True, True), "#two": (True, False)}


def test_anchors_are_those_of_github() -> None:
    assert slug("REINFORCE++ with a baseline") == "reinforce-with-a-baseline"
    assert slug("PPO's clip") == "ppos-clip"
    assert anchors("# A `plinth` b\n\n## Same\n\n## Same\n\n```\n# no heading\n```\n") == [
        "a-plinth-b",
        "same",
        "same-1",
    ]


@pytest.mark.parametrize("file", FILES, ids=name)
def test_python_blocks_parse(file: Path) -> None:
    for block in code_blocks(file.read_text(encoding="utf-8")):
        if block.language == "python":
            # `await` at the top level stands for the body of a coroutine.
            compile(
                block.text,
                f"{name(file)}:{block.line}",
                "exec",
                flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST,
            )


@pytest.mark.parametrize("file", FILES, ids=name)
def test_shell_blocks_parse(file: Path) -> None:
    for block in code_blocks(file.read_text(encoding="utf-8")):
        if block.language in ("bash", "sh"):
            parsed = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
            assert parsed.returncode == 0, f"{name(file)}:{block.line}: {parsed.stderr}"


@pytest.mark.parametrize("config", CONFIGS)
def test_reference_lists_every_key_with_documentation(config: str) -> None:
    module, _, class_name = config.partition(":")
    cls = getattr(importlib.import_module(module), class_name)
    page = reference_text(cls, title="keys")
    blocks = page.split("\n\n")
    for entry in entries(cls):
        if isinstance(entry, Key):
            assert sum(block.startswith(f"`{entry.path}` {{: #{entry.path} }}\n") for block in blocks) == 1, entry.path
    assert [block for block in blocks if "Not documented." in block] == []
