"""Memory, traffic and seconds of a GRPO step on a cluster, calculated: `plinth forecast [section.key=value ...]`.

Nothing is started, and no GPU is needed. Keys are those of a GRPO job, and `cluster.*` for hosts and network, `rates.*`
for the measured rates from which seconds follow. `preset=llama_70b_64_gpus` is a complete example.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import run_kit
from apps.forecast.config import ForecastConfig


def main(config: ForecastConfig) -> None:
    """Prints the settings that are chosen, the memory of a GPU, and the phases of a step."""
    from apps.forecast.plan import plan_job
    from apps.forecast.report import report

    choice, job = plan_job(config)
    print("\n".join(report(choice, job)))


def cli(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command; `argv` defaults to the arguments of the process."""
    presets = Path(__file__).with_name("presets")
    run_kit.run_cli(ForecastConfig, main, app_name="apps.forecast.main", preset_dir=presets, argv=argv)


if __name__ == "__main__":
    cli()
