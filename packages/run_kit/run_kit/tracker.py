"""Tracker: records a run's progress, metrics, curves, rollout samples and summary."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from .cli import INVOKED_AS
from .config.redaction import tree_without_secrets
from .signals import stopping_signal
from .tracking.config import TrackingConfig
from .tracking.curves import import_matplotlib
from .tracking.metrics_table import MetricsTable, atomic_write
from .tracking.progress import SCORE, Progress, duration_text
from .tracking.rollouts import write_rollouts
from .tracking.run_folder import RunFolder, name_s
from .tracking.run_state import StateFile
from .tracking.services import SentOnce, check_tracking, open_services
from .tracking.summary import summarize, tail_mean
from .tracking.writers import TensorBoardWriter


class Tracker:
    """Writes what a run reports into its folder and prints its progress.

    ```
    run = RunFolder.create("outputs", "grpo")
    with Tracker(run, config, num_steps=30) as tracker:
        tracker.log(1, {"critic/score/mean": 0.4, "perf/throughput": 900.0, "timing_s/step": 4.2})
        tracker.log_rollouts(1, [{"prompt": "2+2?", "response": "4", "reward": 1.0}])
    ```

    Within the `with` block stdout, stderr and loggers also go to `train.log`, and `run.json` says that the run lives;
    afterwards it says how the run ended.

    Args:
        run: the run folder; `config.yaml` is written into it.
        config: the app's whole config with a `tracking` section, or a TrackingConfig alone.
        num_steps: number of the last step.
        comment: text for the top of config.yaml.
        resumes: folder of the run that this one resumes, whose runs at experiment services it continues.

    Raises:
        TrackingError: a package that the config needs is not installed, or a service cannot start its run.
    """

    def __init__(
        self,
        run: RunFolder,
        config: Any,
        *,
        num_steps: int,
        comment: str = "",
        resumes: Path | None = None,
    ) -> None:
        self._config: TrackingConfig = config if isinstance(config, TrackingConfig) else config.tracking
        check_tracking(self._config)
        self.run = run
        self.table = MetricsTable(run.metrics_file)
        self._steps_taken = {step for step in self.table.steps if step > 0}
        self.progress = Progress(num_steps)
        self._supervised = MetricsTable(run.supervised_file)
        self._started = time.monotonic()
        self._importing: Thread | None = None
        self._state: StateFile | None = None
        run.write_config(config, comment)
        board = [TensorBoardWriter(run.tensorboard_dir)] if self._config.tensorboard else []
        self._services = open_services(self._config, run.path, tree_without_secrets(config), before=resumes)
        self._writers: list[TensorBoardWriter | SentOnce] = [*board, *self._services]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a finished step and print its line; a second call for a step adds to its row.

        Raises:
            TrackingError: a step before the last one, or a value that is no number.
            RunFolderError: the metrics cannot be written.
        """
        self._record(self.table, step, metrics)
        self._steps_taken.add(step)
        self.progress.step(step, self.table.row(step))
        if step == self.progress.total_steps and (self._config.curves or self._config.report):
            # The import takes a second or more: as long as the ranks and servers of the run take to end.
            self._importing = Thread(target=import_matplotlib, name="import matplotlib", daemon=True)
            self._importing.start()

    def log_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record and print held-out metrics, measured after this step (0: before the first)."""
        self._record(self.table, step, metrics)
        row = self.table.row(step)
        shown = [f"{name.removeprefix('val/')} {row[name]:.4g}" for name in metrics]
        when = "before the first step" if step == 0 else f"after step {step}"
        self.info(f"held-out {when}: {', '.join(shown)}")
        self.progress.restart_clock()

    def log_supervised(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a supervised step of the run's warm start; its metrics have a `loss`."""
        self._record(self._supervised, step, {f"sft/{name}": value for name, value in metrics.items()})
        if step == 1 or step % 50 == 0:
            self.info(f"warm start step {step}  loss {metrics['loss']:.4f}")
        self.progress.restart_clock()

    def log_rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write a sample of a step's rollouts; each record has `prompt`, `response`, `reward` and any further keys."""
        if self._config.rollouts_per_step > 0 and records:
            write_rollouts(self.run.rollouts_dir, step, records, count=self._config.rollouts_per_step)

    def expect(self, num_steps: int) -> None:
        """Set the number of the last step, for a run that counts its steps once its data is loaded."""
        self.progress.total_steps = num_steps
        if self._state is not None:
            self._state.expect(num_steps)

    def info(self, text: str) -> None:
        """Print a line to the user and the log."""
        print(text, flush=True)

    def summary(
        self, *, before: float | None = None, after: float | None = None
    ) -> dict[str, float | int | str | None]:
        """Print the run's results, write them to `summary.json` and return them.

        Args:
            before: held-out accuracy before the first step; None: not measured.
            after: held-out accuracy after the last step.
        """
        scores = summarize(self.table.series(SCORE)[1])
        peaks = self.table.series("memory/host_peak_gib")[1]
        facts: dict[str, float | int | str | None] = {
            "run": self.run.name,
            "num_steps": len(self._steps_taken),  # not the row of a validation before the first step of a resumed run
            "accuracy_before": before,
            "accuracy_after": after,
            "score_first_5": scores.first_mean if scores.num_values else None,
            "score_last_5": scores.last_mean if scores.num_values else None,
            "peak_host_gib": max(peaks, default=None),
            "wall_s": round(time.monotonic() - self._started, 3),
        }
        atomic_write(self.run.summary_file, json.dumps(facts, indent=2) + "\n")
        if before is not None and after is not None:
            self.info(f"held-out accuracy  {before:.3f} before, {after:.3f} after ({after - before:+.3f})")
        elif (known := after if after is not None else before) is not None:
            self.info(f"held-out accuracy  {known:.3f}")
        if 0 < scores.num_values < 10:  # too few to compare the first five with the last five
            score = tail_mean(self.table.series(SCORE)[1], scores.num_values)
            self.info(f"mean score         {score:.3f}")
        elif scores.num_values:
            first, last, change = scores.first_mean, scores.last_mean, scores.change
            self.info(f"mean score         {first:.3f} first five steps, {last:.3f} last five ({change:+.3f})")
        memory = f", at most {max(peaks):.1f} GiB of host memory" if peaks else ""
        self.info(f"{facts['num_steps']} steps in {duration_text(time.monotonic() - self._started)}{memory}")
        self.info(f"run folder         {self.run.path}")
        return facts

    def rewind(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Forget what was logged after this step, because the run continues from there.

        Experiment services keep what they have of these steps.

        Args:
            metrics: those of `step`, for a run that was interrupted before it logged them.
        """
        last_step = max(self.table.steps, default=0)
        self.table.truncate_from(step + 1)
        self._steps_taken = {taken for taken in self._steps_taken if taken <= step}
        self.progress.restart_clock()
        for writer in self._writers:
            if line := writer.rewind(step, last_step=last_step):
                self.info(line)
        if step not in self.table.steps and metrics:
            self._record(self.table, step, metrics)
            self._steps_taken.add(step)

    def rewind_supervised(self) -> None:
        """Forget the supervised steps, because the warm start begins again."""
        self._supervised.truncate_from(1)

    def close(self, *, failed: bool = False) -> None:
        """Draw the curves, write the report, close the writers.

        Args:
            failed: tell the experiment services that an error ended the run.
        """
        if self._importing is not None:
            self._importing.join()
        try:
            if self._config.curves and self.table.steps:
                from .tracking.curves import write_curves

                write_curves(self.table, self.run.curves_file, title=self.run.name)
            if self._config.report and self.table.steps:
                from .report.runs import write_report

                write_report(self.run.path)
        finally:
            for writer in self._writers:
                writer.close(failed=failed)

    def _record(self, table: MetricsTable, step: int, metrics: Mapping[str, Any]) -> None:
        table.log(step, metrics)
        row = table.row(step)
        for writer in self._writers:
            writer.write(step, {name: row[name] for name in metrics})

    def __enter__(self) -> "Tracker":
        self._state = StateFile(
            self.run.state_file,
            app=INVOKED_AS.get(),
            num_steps=self.progress.total_steps,
            not_before=name_s(self.run.name),
        )
        self.run.__enter__()
        for service in self._services:
            self.info(service.describe())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._finish(error)
        except Exception as failed:
            if error is None:
                raise
            # The exit code must report the original error. After Ctrl-C in the middle of an import, for example, the
            # imported module is unusable, and drawing the last curves fails.
            error.add_note(f"Closing the tracker failed as well: {failed!r}")
        finally:
            self.run.__exit__(kind, error, trace)

    def _finish(self, error: BaseException | None) -> None:
        """Closes, and writes how the run ended: with `error`, with one of closing, or finished."""
        try:
            self.close(failed=error is not None and stopping_signal(error) is None)
        except Exception as failed:
            error = error or failed
            raise
        finally:
            if self._state is not None:
                self._state.close(error)
                self._state = None
