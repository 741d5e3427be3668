"""Secrets stay out of files, logs and command lines."""

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from run_kit import RunFolder, run_cli
from run_kit.config.redaction import redact, secrets_in, tree_without_secrets


@dataclass(frozen=True, kw_only=True)
class Example:
    url: str = "http://me:word@host:1/path"
    api_key: str | None = None
    api_key_file: str | None = None


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("url: http://me:word@host:1/path, ftp://x@y", "url: http://***@host:1/path, ftp://***@y"),
        ("http://host/a@b 'tcp://1.2.3.4:5' me@host", "http://host/a@b 'tcp://1.2.3.4:5' me@host"),
        ("('http://a:b@c', 'http://d')", "('http://***@c', 'http://d')"),
        ("http://a/b?api_key=x&n=2", "http://a/b?api_key=***&n=2"),
        ("'s3://a/b?n=2&X-Amz-Signature=x#part'", "'s3://a/b?n=2&X-Amz-Signature=***#part'"),
        ("https://a?sig=x y?Token=z", "https://a?sig=*** y?Token=***"),
        ("http://a/b?monkey=x&top_k=3&tokens=4 key=5", "http://a/b?monkey=x&top_k=3&tokens=4 key=5"),
    ],
)
def test_credentials_and_secret_parameters_of_urls_are_redacted(text: str, redacted: str) -> None:
    assert redact(text) == redacted


def test_secrets_of_the_environment_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "A_TOKEN": "longsecret",
        "B_API_KEY": "longsecret-2",
        "C_TOKEN": "short",
        "TOKENS": "x" * 9,
    }.items():
        monkeypatch.setenv(name, value)
    assert redact(f"longsecret-2 longsecret short {'x' * 9}") == f"*** *** short {'x' * 9}"


@pytest.mark.parametrize("key", ["api_key", "password", "hf_token", "token", "client_secret", "aws_secret_access_key"])
def test_a_secret_key_is_null_wherever_it_is(key: str) -> None:
    tree = {"a": [{key: "x"}], "options": {key: "x", "n": 1, f"{key}_file": "f", "stop_token": "</s>", "eos_token": 2}}
    expected = {"a": [{key: None}], "options": tree["options"] | {key: None}}  # type: ignore[operator]
    assert tree_without_secrets(tree) == expected


def test_secrets_on_a_command_line_are_found() -> None:
    given = [
        "rollout.api_key=abc",
        "reward.api_key=${oc.env:KEY}",
        "rollout.api_key_file=f",
        "token_budget=3",
        "a.token=",
    ]
    assert secrets_in(given) == ["rollout.api_key"]


def test_a_run_folder_is_private_and_holds_no_credentials(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "outputs", "x")
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert RunFolder.create(tmp_path / "outputs", "open", private=False).path.stat().st_mode & 0o077
    run.write_config(Example())
    with run:
        print("connecting to http://me:word@host:1")
        logging.getLogger("run_kit.example").warning("no answer from %s", Example().url)
    for file in run.path.iterdir():
        assert "word" not in file.read_text()
        assert "http://***@host:1" in file.read_text()


def test_a_secret_among_the_arguments_brings_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: Example) -> None:
        raise RuntimeError(config.api_key)

    with pytest.raises(RuntimeError, match="abc"):
        run_cli(Example, fail, app_name="example", argv=["api_key=abc"])
    assert "every user of this host can read api_key on the command line" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_cli(Example, lambda _: None, app_name="example", argv=["api_key=${oc.env:HOME}", "api_key_file=f"])
    assert capsys.readouterr().err == ""
