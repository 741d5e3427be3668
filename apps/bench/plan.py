"""Plans the cases of a benchmark. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from apps.bench.config import AlgorithmsConfig, BenchConfig, SixCaseConfig, StageGateConfig, app_of


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of an app; `arguments` are its command-line arguments except experiment name and output folder."""

    name: str
    app: str
    seed: int
    steps: int
    arguments: tuple[str, ...]
    stage: int | None = None
    """ZeRO stage; None, like `offload` and `step_each_micro` below: that of the preset."""
    offload: str = ""
    step_each_micro: bool = False


def plan_six(config: SixCaseConfig) -> list[Case]:
    """PPO with each stage and offload, in the configured order."""
    return [
        _case(config, name, "ppo", name, config.seed, stage=int(name[len("zero")]), each=config.step_each_micro)
        for name in config.cases
    ]


def plan_gate(config: StageGateConfig) -> list[Case]:
    """For each seed, ZeRO-1 and then ZeRO-2 with each value of `step_each_micro`."""
    cases = []
    for seed in config.seeds:
        for each in (None, *config.step_each_micro):
            name, stage = (zero1_name(seed), 1) if each is None else (zero2_name(seed, each), 2)
            stages = [f"{engine}.zero.stage={stage}" for engine in _engines(config.app)]
            cases.append(_case(config, name, config.app, "gsm8k", seed, stage=stage, each=bool(each), more=stages))
    return cases


def plan_algorithms(config: AlgorithmsConfig) -> list[Case]:
    """For each preset, one run with each seed."""
    return [
        Case(
            name=algorithm_name(preset, seed),
            app=app_of(preset),
            seed=seed,
            steps=config.steps,
            arguments=_arguments(config, preset, seed),
        )
        for preset in config.presets
        for seed in config.seeds
    ]


def algorithm_name(preset: str, seed: int) -> str:
    """Name of the case of a preset."""
    return f"{preset}_seed{seed}"


def zero1_name(seed: int) -> str:
    """Name of the gate's ZeRO-1 case."""
    return f"z1_seed{seed}"


def zero2_name(seed: int, step_each_micro: bool) -> str:
    """Name of the gate's ZeRO-2 case."""
    return f"z2_micro{int(step_each_micro)}_seed{seed}"


def _case(
    config: BenchConfig,
    name: str,
    app: str,
    preset: str,
    seed: int,
    *,
    stage: int,
    each: bool,
    more: Sequence[str] = (),
) -> Case:
    switches = [
        f"{engine}.zero.{key}={str(value).lower()}"
        for engine in _engines(app)
        for key, value in (("fp32_grad_accum", config.fp32_grad_accum), ("step_each_micro", each))
    ]
    return Case(
        name=name,
        app=app,
        stage=stage,
        offload="cpu" if "cpu" in preset else "none",
        step_each_micro=stage == 2 and each,
        seed=seed,
        steps=config.steps,
        arguments=_arguments(config, preset, seed, [*more, *(switches if stage == 2 else ())]),
    )


def _arguments(config: BenchConfig, preset: str, seed: int, more: Sequence[str] = ()) -> tuple[str, ...]:
    return (
        f"preset={preset}",
        *(f"overlay={overlay}" for overlay in config.overlays),
        *more,
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={config.steps}",
        "trainer.export_model=false",
        *config.overrides,
    )


def _engines(app: str) -> tuple[str, ...]:
    return ("actor", "critic") if app == "ppo" else ("actor",)
