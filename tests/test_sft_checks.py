"""Conversations that a template cannot show are refused before there is a run folder or a process."""

import json
from pathlib import Path

import pytest

from apps.sft.config import SftConfig
from apps.sft.main import main
from plinth_testing import raises
from rl_data import build_tiny_model
from run_kit import load_config


@pytest.mark.parametrize(
    ("template", "field"),
    [
        # An answer is marked only where it ends the conversation.
        (
            "{% for m in messages %}{{ '=' if loop.last and m.role == 'assistant' }}{{ m.content }}{% endfor %}",
            "supervised.files",
        ),
        ("{{ raise_exception('no roles') }}", "supervised.files"),
        (None, None),
    ],
)
def test_refused_before_the_run_folder(tmp_path: Path, template: str | None, field: str | None) -> None:
    folder = build_tiny_model(tmp_path / "model")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    messages = [{"role": role, "content": "2"} for role in ("user", "assistant", "user", "assistant")]
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": messages}) + "\n")
    given = [f"model.path={folder}", f"supervised.files={chat}", f"trainer.output_dir={tmp_path / 'outputs'}"]
    if template is None:
        given.append("data.chat_template=always")
    with raises(ValueError, field=field):
        main(load_config(SftConfig, presets=[], overrides=[*given, "trainer.device=cpu"]))
    assert not (tmp_path / "outputs").exists()
