"""An app for the tests of batch files: takes steps, saves after the step in which a signal comes, and resumes.

`register(folder)` makes it the command `plinth toy`, and `plinth once` the same without resume, for processes that have
`folder` on their import path.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from run_kit import RunStopped, StopRequest, run_cli


@dataclass(frozen=True, kw_only=True)
class Trainer:
    experiment: str = "toy"
    output_dir: str = "outputs"
    resume: Literal["never", "auto"] = "never"
    resume_from: str | None = None
    ray_address: str | None = None
    save_freq: int = 0
    steps: int = 3
    step_s: float = 0.1
    fail_at: int = 0


@dataclass(frozen=True, kw_only=True)
class Model:
    path: str = "builtin:toy"


@dataclass(frozen=True, kw_only=True)
class Data:
    train: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Config:
    """Takes steps."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    trainer: Trainer = field(default_factory=Trainer)


@dataclass(frozen=True, kw_only=True)
class Once:
    """Cannot resume."""

    seed: int = 1


def main(config: Config) -> None:
    trainer, stop = config.trainer, StopRequest()
    saved = Path(trainer.output_dir) / f"{trainer.experiment}.json"
    done = json.loads(saved.read_text()) if trainer.resume == "auto" and saved.exists() else 0
    if trainer.ray_address is not None:
        print_nodes(trainer.ray_address)
    with stop.listen("stopping after this step"):
        for step in range(done + 1, trainer.steps + 1):
            print(f"step {step} begins", flush=True)
            time.sleep(trainer.step_s)
            if step == trainer.fail_at:
                raise ValueError("a step failed")
            print(f"step {step} of {trainer.experiment} is done", flush=True)
            if stop.signal and step < trainer.steps:
                saved.write_text(json.dumps(step))
                raise RunStopped(stop.signal)


def print_nodes(address: str) -> None:
    """Joins the cluster and runs a task on each of its nodes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address, log_to_driver=False)

    @ray.remote(num_cpus=1)
    def where() -> str:
        return str(ray.util.get_node_ip_address())

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    on = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    addresses = ray.get([where.options(scheduling_strategy=strategy).remote() for strategy in on])
    print("tasks ran on", *sorted(addresses), flush=True)
    ray.shutdown()


def cli(argv: list[str]) -> None:
    run_cli(Config, main, app_name="plinth toy", argv=argv)


def once(argv: list[str]) -> None:
    run_cli(Once, print, app_name="plinth once", argv=argv)


def register(folder: Path) -> dict[str, Any]:
    """Writes a distribution that registers the commands; the environment in which processes find it."""
    info = folder / "run_kit_cluster_app-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: run-kit-cluster-app\nVersion: 1.0\n")
    module = Path(__file__).stem
    (info / "entry_points.txt").write_text(f"[plinth.commands]\ntoy = {module}:cli\nonce = {module}:once\n")
    return {"PYTHONPATH": ":".join([str(folder), str(Path(__file__).parent), *filter(None, sys.path)])}
