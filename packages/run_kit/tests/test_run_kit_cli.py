import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from run_kit_testkit import Example

from run_kit.cli import is_user_error, run_cli
from run_kit.errors import ConfigError, RunKitError, TrackingError

HEAD = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from run_kit_testkit import Example
from run_kit import run_cli
"""


def write_app(folder: Path, body: str) -> Path:
    script = folder / "app.py"
    script.write_text(HEAD + body)
    return script


def failing(error: Exception) -> Callable[[Example], None]:
    def main(_: Example) -> None:
        raise error

    return main


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    (tmp_path / "overlays").mkdir()
    (tmp_path / "base.yaml").write_text("# The base values,\n# e.g. 2. More text.\nseed: 2\nexperiment: base\n")
    (tmp_path / "zero3.yaml").write_text("actor: {zero: {stage: 3}}\n")
    (tmp_path / "overlays" / "tiny.yaml").write_text("# Small.\nseed: 3\n")
    return tmp_path


def run(
    *argv: str, preset_dir: Path | None = None, main: object = None, **options: object
) -> tuple[int, list[Example]]:
    seen: list[Example] = []

    def record(config: Example) -> None:
        seen.append(config)

    with pytest.raises(SystemExit) as caught:
        run_cli(Example, main or record, app_name="apps.example", preset_dir=preset_dir, argv=argv, **options)  # type: ignore[arg-type]
    code = caught.value.code
    assert isinstance(code, int)
    return code, seen


def test_no_arguments_run_the_defaults() -> None:
    assert run() == (0, [Example()])


def test_presets_overlays_files_and_keys_in_their_order(presets: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("seed: 4\n")
    code, (config,) = run("overlay=tiny", "preset=base", preset_dir=presets)
    assert (code, config.seed, config.experiment) == (0, 3, "base")
    _, (config,) = run("preset=base", "overlay=tiny", f"config={own}", "preset=zero3", preset_dir=presets)
    assert (config.seed, config.actor.zero.stage) == (4, 3)
    _, (config,) = run("seed=9", f"config={own}", preset_dir=presets)
    assert config.seed == 9
    _, (config,) = run("overlay=zero3", preset_dir=presets)
    assert config.actor.zero.stage == 3


def test_default_preset(presets: Path) -> None:
    options = {"default_preset": "base", "default_preset_unless": ("data.train",)}
    assert run(preset_dir=presets, **options)[1][0].seed == 2
    assert run("data.train=x", preset_dir=presets, **options)[1][0].seed == 1
    config = run("preset=zero3", preset_dir=presets, **options)[1][0]  # below a preset that does not name data
    assert (config.seed, config.experiment, config.actor.zero.stage) == (2, "base", 3)
    config = run("overlay=tiny", preset_dir=presets, **options)[1][0]
    assert (config.seed, config.experiment) == (3, "base")


@pytest.mark.parametrize("text", ["data: {train: [x]}\n", "base: own.yaml\n"])
def test_a_file_that_gives_the_data_disables_the_default_preset(presets: Path, text: str) -> None:
    (presets / "own.yaml").write_text("data: {train: [x]}\n")
    (presets / "mine.yaml").write_text(text)
    options = {"default_preset": "base", "default_preset_unless": ("data.train",)}
    for given in ("preset=mine", f"config={presets / 'mine.yaml'}"):
        assert run(given, preset_dir=presets, **options)[1][0].seed == 1


def test_main_decides_the_exit_code() -> None:
    assert run(main=lambda _: 3)[0] == 3
    assert run(main=lambda _: None)[0] == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("preset=bse",), ["unknown preset 'bse'", "nearest: base", "available: base, zero3"]),
        (("overlay=tin",), ["unknown overlay 'tin'", "nearest: tiny"]),
        (("preset=x/base.yaml",), ["config=x/base.yaml"]),
        (("config=nowhere.yaml",), ["cannot read the file nowhere.yaml"]),
        (("config=~nobody-here/a.yaml",), ["cannot read the file ~nobody-here/a.yaml"]),
        (("config=a\0b",), ["null"]),
        (("--seed=3",), ["write seed=3 without the leading --"]),
        (("+actor.zero.stage=3",), ["write actor.zero.stage=3 without the leading +"]),
        (("--sede",), ["unknown argument '--sede'", "nearest key: seed=value"]),
        (("seed",), ["'seed' has no value; write seed=value"]),
        (("sede=3",), ["sede: unknown key", "nearest: seed"]),
        (("sede=3", "actor.zero.stage=9"), ["2 problems", "one of 1, 2, 3"]),
    ],
)
def test_mistakes_exit_2_with_one_message(
    presets: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: list[str]
) -> None:
    code, seen = run(*argv, preset_dir=presets)
    assert (code, seen) == (2, [])
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert "Traceback" not in printed.err
    for word in words:
        assert word in printed.err


def test_help_lists_everything(presets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run("--help", preset_dir=presets, examples=("seed=2",))
    text = capsys.readouterr().out
    assert code == 0
    for words in (
        "usage: python -m apps.example [preset=NAME]",
        "An example app.",
        "base   The base values, e.g. 2. More text.",
        "tiny  Small",
        "python -m apps.example seed=2",
        "actor.zero.stage: 1|2|3 = 2",
        "ZeRO stage.",
        "critic.zero (off unless given)  -  Sharding.",
        "data.train: tuple[str, ...] = []",
        "actor.optim.warmup: int | None = null",
        "slow.optim.lr: float = 0.5",
        "data.system_prompt: str | None = null",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 110


def test_common_keys_come_in_place_of_all_and_before_presets_in_short(
    presets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("seed", "actor.zero.stage", "not.here")
    run("--help", common_keys=(*common, "critic.zero.stage"), preset_dir=presets)
    text = capsys.readouterr().out
    assert "critic.zero.stage: 1|2|3 (off unless given)" in text
    assert text.index("Common keys") < text.index("Presets\n  base   The base values, e.g. 2\n")
    for arguments, listed in (
        (["--help"], ["seed", "actor.zero.stage"]),
        (["--help", "all"], ["experiment", "seed", "actor.enabled", "actor.zero.stage"]),
        (["help", "zero.off"], ["actor.zero.offload", "critic.zero.offload", "slow.zero.offload"]),
    ):
        run(*arguments, common_keys=common)
        text = capsys.readouterr().out
        keys = re.findall(r"^  ([a-z_.]+): ", text, re.MULTILINE)
        assert keys[: len(listed)] == listed
        assert (len(keys) == 2) == ("--help all: all 27 keys" in text)


def test_help_of_a_command_without_presets_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m apps.example [config=FILE.yaml] [key=value ...]")
    assert "preset=" not in text
    assert "overlay=" not in text


def test_help_of_some_keys(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help", "actor.zero")
    text = capsys.readouterr().out
    assert "actor.zero.stage" in text
    assert "data.train" not in text
    run("--help", "stge")
    assert "Nearest: actor.zero.stage" in capsys.readouterr().out
    run("--help", "promtp")
    assert "Nearest: data.system_prompt" in capsys.readouterr().out


def test_print_config_writes_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--print-config", "seed=5")[0] == 0
    assert "seed: 5" in capsys.readouterr().out


def test_user_errors_are_value_errors_of_these_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert is_user_error(ConfigError("x"))
    assert is_user_error(TrackingError("x"))
    assert not is_user_error(RunKitError("x"))
    assert not is_user_error(ValueError("x"))

    assert run(main=failing(TrackingError("no such folder")))[0] == 2
    assert capsys.readouterr().err == "error: no such folder\n"


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(ValueError, match="a bug"):
        run_cli(Example, failing(ValueError("a bug")), app_name="x", argv=[])


def test_an_error_wrapped_by_a_remote_call_is_unwrapped(capsys: pytest.CaptureFixture[str]) -> None:
    class Remote(Exception):
        cause = TrackingError("real reason")

    assert run(main=failing(Remote("a page of remote traceback")))[0] == 2
    assert capsys.readouterr().err == "error: real reason\n"


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    script = write_app(
        tmp_path,
        "try:\n    run_cli(Example, print, app_name='x')\nfinally:\n"
        "    heavy = {'torch', 'ray', 'numpy', 'matplotlib', 'pydantic', 'omegaconf'} & set(sys.modules)\n"
        "    print('heavy:', sorted(heavy), file=sys.stderr)\n",
    )
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "heavy: []" in done.stderr) == (0, True)


DISK_FULL = """
import resource, sys
from dataclasses import dataclass, field
from run_kit import RunFolder, Tracker, TrackingConfig, run_cli

@dataclass(frozen=True, kw_only=True)
class Config:
    output: str = "."
    limit: int = 0
    tracking: TrackingConfig = field(default_factory=lambda: TrackingConfig(report=False, curves=False))

def main(config):
    with Tracker(RunFolder.create(config.output, "x"), config, num_steps=9) as tracker:
        tracker.log(1, {"a": 1.0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (config.limit, config.limit))
        tracker.log(2, {"a": 2.0})

run_cli(Config, main, app_name="x", argv=sys.argv[1:])
"""


@pytest.mark.parametrize(("limit", "file"), [(1, "metrics.tsv"), (60, "events.out.tfevents")])
def test_a_full_disk_ends_the_run_with_one_message_and_exit_1(tmp_path: Path, limit: int, file: str) -> None:
    command = [sys.executable, "-c", DISK_FULL, f"output={tmp_path}", f"limit={limit}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    named = rf"error: {tmp_path}/x_\d+_\d+/\S*{file}\S* cannot be written: File too large; [\d,]+ bytes are free"
    assert re.match(named, error), error
