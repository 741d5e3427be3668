"""Random command lines through the apps' real loading and checks: a right configuration or one clear error, exit 2."""

import contextlib
import io
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, given, note, settings

import apps.bench.plan as bench_plan
import apps.distill.main as distill
import apps.evaluate.checks as evaluate
import apps.grpo.main as grpo
import apps.ppo.main as ppo
import apps.reward.main as reward
import apps.sft.main as sft
import ds_engine.__main__ as ds_engine_cli
import rl_runtime
from apps.bench.config import SixCaseConfig, StageGateConfig
from apps.distill.config import DistillConfig
from apps.dpo.config import DpoConfig
from apps.evaluate.config import EvaluateConfig
from apps.grpo.config import GrpoConfig
from apps.ppo.config import PpoConfig
from apps.reward.config import RewardConfig
from apps.sft.config import SftConfig
from rl_data import build_tiny_model
from run_kit import load_config, run_cli, to_yaml
from run_kit.config.schema import Key, alternatives, choices, entries, item_hint

APPS = Path(__file__).resolve().parents[1] / "apps"
ODD = [
    "", "null", "~", "true", "off", "0", "-1", "2", "3", "1.5", "-0.0", "1e3", "1e-6", "1e999", "nan", ".inf", "0x10",
    "9" * 30, "1" * 5000, "1_000", "2020-01-01", "[1]", "[]", "{}", "{a: 1}", "[[1]]", "[null]", "[nan]", "-", "- 1",
    "? a", "{? [1]: 2}", "&a [*a]", "&a {b: *a}", "*a", "!!python/object/apply:os.system [true]", "!!binary aGk=",
    "!!int x", "!x y", "<<: 1", "|", "%", "@x", "`x`", "'", '"\\ud800"', "${", "${x}", "${actor}", "${trainer.seed}",
    "${oc.env:NOPE}", "${oc.decode:[}", "\\${x}", "???", "[" * 600, "[" * 500 + "]" * 500,
    "{a: " * 400 + "1" + "}" * 400, "a: b: c", "a\nb", "\x00", "\x1b[31m", "\ud800", "é", "\u202e", "\x85",
    "a" * 9000, "a/" * 3000, "/dev/null", "/proc/1/mem", "a[b]", "a*", "~nobody", "http://", "http://[",
    "http://a:99999", "http://127.0.0.1:9", "127.0.0.1:9", ":", "x/y/z", "json:loads", "nowhere:f", "math:hypot",
    "builtin:tiny", "cpu", "cuda", "auto", "# a", "{question}", "{0}", "%s",
]  # fmt: skip
NUMBERS = ["0", "1", "2", "4", "8", "64", "1000", "-1", "0.5", "1e-5", "1e308", "5e-324", str(2**40), str(2**63 - 1)]


@dataclass(frozen=True, kw_only=True)
class App:
    config_cls: type
    start: Callable[..., Any]
    check: Callable[[Any], object]


def demo_app(config_cls: type, check: Callable[[Any], object], name: str) -> App:
    """Without `rl_runtime.run_job_cli`, which starts a process of vLLM for each configuration."""
    start = partial(
        run_cli,
        app_name=name,
        preset_dir=APPS / name / "presets",
        default_preset="demo",
        default_preset_unless=("model.path", "data.train", "supervised.files"),
    )
    return App(config_cls=config_cls, start=start, check=check)


def supervised_app(config_cls: type, check: Callable[[Any], object], name: str) -> App:
    return demo_app(config_cls, lambda config: check(rl_runtime.resolve_supervised(config).config), name)


BENCH = partial(run_cli, app_name="bench", preset_dir=APPS / "bench" / "presets")
BY_NAME = {
    "grpo": demo_app(GrpoConfig, grpo.check, "grpo"),
    "ppo": demo_app(PpoConfig, ppo.check, "ppo"),
    "distill": demo_app(DistillConfig, distill.check, "distill"),
    "sft": supervised_app(SftConfig, sft.check, "sft"),
    "reward": supervised_app(RewardConfig, reward.check, "reward"),
    "dpo": supervised_app(DpoConfig, rl_runtime.check_run, "dpo"),
    "six_case": App(config_cls=SixCaseConfig, start=BENCH, check=bench_plan.plan_six),
    "stage_gate": App(config_cls=StageGateConfig, start=BENCH, check=bench_plan.plan_gate),
    "evaluate": App(config_cls=EvaluateConfig, start=partial(run_cli, app_name="evaluate"), check=evaluate.check),
}
KEYS = {name: [e for e in entries(app.config_cls) if isinstance(e, Key)] for name, app in BY_NAME.items()}


def fitting_text(chance: random.Random, hint: Any) -> str:
    """A value of the right type for a key, often out of range."""
    members, nullable = alternatives(hint)
    if nullable and chance.random() < 0.2:
        return "null"
    if words := choices(hint):
        return str(chance.choice(words))
    if bool in members:
        return chance.choice(["true", "false"])
    if (item := item_hint(hint)) is not None:
        return f"[{', '.join(fitting_text(chance, item) for _ in range(chance.randint(0, 3)))}]"
    return chance.choice(NUMBERS) if {int, float} & set(members) else chance.choice([t for t in ODD if t.isprintable()])


def mistyped(chance: random.Random, key: str) -> str:
    at = chance.randrange(len(key))
    tails = [f"{key}.x", f"{key}[0]", f"{key}.", key.upper(), f".{key}", f"--{key}", f"+{key}", key.replace(".", "..")]
    return chance.choice(
        [key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:], *tails, "config", "preset", "a.${x}"]
    )


def command_line(name: str, chance: random.Random) -> list[str]:
    arguments = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        key, kind = chance.choice(KEYS[name]), chance.random()
        value = fitting_text(chance, key.hint) if kind < 0.5 else chance.choice(ODD)
        if kind > 0.9:
            value = "".join(chance.choice("[]{}:,-?&*!|>'\"%@` \n#ab1.~\\$=\x00é\udc80") for _ in range(9))
        word = mistyped(chance, key.path) if chance.random() < 0.1 else key.path
        section = word.rpartition(".")[0] if chance.random() < 0.05 else word
        arguments.append(f"{section}={value}" if chance.random() < 0.97 else value)
    return arguments


def outcome(start: Callable[[], Any]) -> tuple[object, str]:
    """Exit code and stderr; any exception but SystemExit is a traceback for the user."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            start()
        except SystemExit as stop:
            return stop.code, errors.getvalue()
    return 0, errors.getvalue()


def check_one(name: str, arguments: list[str], folder: Path) -> None:
    app, accepted = BY_NAME[name], []

    def main(config: Any) -> None:
        app.check(config)
        accepted.append(config)

    code, errors = outcome(lambda: app.start(app.config_cls, main, argv=arguments))
    if code == 0 and any(a in ("--help", "-h", "help", "--print-config") for a in arguments):
        return
    if code == 0:
        check_accepted(app, accepted[0], arguments, folder)
        return
    assert code == 2, errors
    assert any(line.startswith("error: ") for line in errors.splitlines())
    assert "Traceback" not in errors
    assert len(errors) < 20_000
    known = {key.path for key in KEYS[name]}
    if len(arguments) == 1 and (key := arguments[0].partition("=")[0]) in known:
        words = {part.rpartition(".")[2] for part in known}
        assert key in errors or any(word in errors for word in words), "the error names no key"
        section = key.rpartition(".")[0] or key
        assert "--help" not in errors or section in errors, "a problem of the configuration names its dotted path"


def check_accepted(app: App, config: Any, arguments: list[str], folder: Path) -> None:
    file = folder / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8", newline="")
    assert load_config(app.config_cls, presets=[file]) == config, "the written configuration repeats the run"
    for path, value in leaves(config):
        assert not isinstance(value, float) or math.isfinite(value), path
    key, _, text = arguments[0].partition("=")
    if len(arguments) == 1 and not set(text) & set("$'\"&*![{"):
        value = config
        for word in key.split("."):
            value = value[word] if isinstance(value, Mapping) else getattr(value, word) if word else None
        assert says(text, value), f"{key} is {value!r}"


def says(text: str, value: Any) -> bool:
    """True if a plain text means the value, read by rules of its own."""
    if value is None:
        return text in ("null", "~", "None") or not text.strip()
    if isinstance(value, bool):
        return text == str(value).lower()
    if isinstance(value, (int, float)):
        return float(int(text, 16) if text.startswith("0x") else text.replace("_", "")) == float(value)
    return bool(text == value or value in ((text,), ()) or isinstance(value, tuple))


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in vars(config).items():
        if hasattr(value, "__dataclass_fields__"):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def fuzz(folder: Path, num_lines: int) -> None:
    @settings(
        max_examples=num_lines, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(st.sampled_from(sorted(BY_NAME)), st.integers(0, 2**32))
    def each_line(name: str, seed: int) -> None:
        arguments = command_line(name, random.Random(seed))
        note(f"{name}: {arguments}")
        check_one(name, arguments, folder)

    each_line()


def test_a_random_command_line_loads_right_or_ends_in_one_clear_error(tmp_path: Path) -> None:
    fuzz(tmp_path, 100)


def test_random_settings_of_the_planner_end_in_a_table_or_one_clear_error(tmp_path: Path) -> None:
    model, chance = build_tiny_model(tmp_path), random.Random(1)
    keys = [entry for entry in entries(ds_engine_cli.EngineConfig) if isinstance(entry, Key)]
    codes = []
    for _ in range(60):
        key = chance.choice(keys)
        value = fitting_text(chance, key.hint) if chance.random() < 0.5 else chance.choice(ODD)
        arguments = [str(model), "--tokens", chance.choice(["1000", "1000", "-1", "x"]), f"{key.path}={value}"]
        code, errors = outcome(partial(ds_engine_cli.plan, arguments))
        codes.append(code)
        assert code in (0, 2), arguments
        assert code == 0 or errors.splitlines()[-1].startswith(("error: ", "plinth plan: error: ")), errors
        assert code == 0 or "tokens" in errors or key.path.rpartition(".")[2] in errors
    assert {0, 2} == set(codes)
