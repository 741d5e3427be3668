"""Plans the cases of a benchmark. Pure."""

from dataclasses import dataclass

from apps.bench.config import BenchConfig, SixCaseConfig, StageGateConfig


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of an app; `arguments` are its command-line arguments except experiment name and output folder."""

    name: str
    app: str
    stage: int
    offload: str
    step_each_micro: int
    seed: int
    steps: int
    arguments: tuple[str, ...]


def plan_six(config: SixCaseConfig) -> list[Case]:
    """PPO with each stage and offload, in the configured order."""
    return [_stage_case(config, name, "ppo", name, config.seed, each=config.step_each_micro) for name in config.cases]


def plan_gate(config: StageGateConfig) -> list[Case]:
    """Cases of each seed: ZeRO-1 and then ZeRO-2, with each value of `step_each_micro`."""
    runs = [(seed, each) for seed in config.seeds for each in (None, *config.step_each_micro)]
    return [_stage_case(config, gate_name(seed, each), config.app, "gsm8k", seed, each=each) for seed, each in runs]


def gate_name(seed: int, step_each_micro: bool | None) -> str:
    """Name of a case of the gate; None: of ZeRO-1."""
    return f"z1_seed{seed}" if step_each_micro is None else f"z2_micro{int(step_each_micro)}_seed{seed}"


def _stage_case(config: BenchConfig, name: str, app: str, preset: str, seed: int, *, each: bool | None) -> Case:
    """A run at the ZeRO stage that its name begins with (`z1`, `zero3`)."""
    stage = int(name.removeprefix("zero").removeprefix("z")[0])
    keys = {"stage": str(stage)}
    if stage == 2:
        keys |= {"fp32_grad_accum": str(config.fp32_grad_accum).lower(), "step_each_micro": str(bool(each)).lower()}
    engines = ("actor", "critic") if app == "ppo" else ("actor",)
    switches = [f"{engine}.zero.{key}={value}" for engine in engines for key, value in keys.items()]
    return Case(
        name=name,
        app=app,
        stage=stage,
        offload="cpu" if "cpu" in preset else "none",
        step_each_micro=int(stage == 2 and bool(each)),
        seed=seed,
        steps=config.steps,
        arguments=(
            f"preset={preset}",
            *(f"overlay={overlay}" for overlay in config.overlays),
            *switches,
            f"trainer.seed={seed}",
            f"trainer.total_training_steps={config.steps}",
            "trainer.export_model=false",
            *config.overrides,
        ),
    )
