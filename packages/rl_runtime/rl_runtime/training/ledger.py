"""`samples.tsv`: what became of every sample that a step has ended, one line each.

A run that continues from a checkpoint drops the lines of later steps, as its metrics do, and a resumed run begins with
the lines of the run before, if its folder is there. So the ledger of a run has each sample once, or the run has
a fault.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckpt import Checkpoint
from rollout_vllm import Group
from run_kit.tracking.metrics_table import atomic_write, naming_file

from ..rollout.groups import Collected

FILE_NAME = "samples.tsv"
_HEADER = "step\tgroup\tsample\toutcome\toldest_version\tnewest_version\n"


class SampleRow(NamedTuple):
    """A line of `samples.tsv`."""

    step: int
    """The step that ended the sample."""
    group: str
    """Name of its group in the run, `<step it was drawn for>/<number>:<id of the prompt>`."""
    sample: int
    """Its index in the group."""
    outcome: str
    """`trained`; `failed`: not generated or scored; `left_out`: nothing to compare it with, or dropped by dynamic
    sampling."""
    oldest_version: str
    """Policy version of its oldest token; empty if it has none."""
    newest_version: str

    def text(self) -> str:
        """The line."""
        return "\t".join(map(str, self)) + "\n"


class SampleLedger:
    """Writes the ledger of a run; continues an existing file."""

    def __init__(self, folder: Path, resumed: Checkpoint | None = None) -> None:
        """`resumed`: of another run, with whose ledger this one begins."""
        self._path = folder / FILE_NAME
        if not self._path.exists():
            before = None if resumed is None else resumed.path.parents[1]
            rows = read_samples(before) if before is not None and (before / FILE_NAME).is_file() else []
            self._write([row for row in rows if resumed is not None and row.step <= resumed.step])

    def rewind(self, step: int) -> None:
        """Drops what was recorded after this step."""
        self._write([row for row in read_samples(self._path.parent) if row.step <= step])

    def add(self, step: int, collected: Collected) -> None:
        """Records the samples of all groups that ended in this step.

        Raises:
            run_kit.RunFolderError: the file cannot be written.
        """
        trained = {(sample.prompt_id, sample.sample_index) for sample in collected.samples}
        rows = [row for group in collected.ended for row in _rows_of(step, group, trained)]
        with naming_file(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write("".join(row.text() for row in rows))

    def _write(self, rows: list[SampleRow]) -> None:
        atomic_write(self._path, _HEADER + "".join(row.text() for row in rows))


def read_samples(folder: Path) -> list[SampleRow]:
    """The lines of a run folder's ledger; a last line that was cut by a kill is left out."""
    *lines, _ = (folder / FILE_NAME).read_text(encoding="utf-8").split("\n")
    cells = [line.split("\t") for line in lines[1:]]
    return [SampleRow(int(step), group, int(sample), *rest) for step, group, sample, *rest in cells]


def _rows_of(step: int, group: Group, trained: set[tuple[str, int]]) -> Iterator[SampleRow]:
    rows = {
        failure.sample_index: SampleRow(step, group.prompt_id, failure.sample_index, "failed", "", "")
        for failure in group.failures
    }
    for sample in group.samples:
        outcome = "trained" if (group.prompt_id, sample.sample_index) in trained else "left_out"
        versions = [span.policy_version for path in sample.paths for span in path.version_spans]
        oldest, newest = str(min(versions)), str(max(versions))
        rows[sample.sample_index] = SampleRow(step, group.prompt_id, sample.sample_index, outcome, oldest, newest)
    return (rows[index] for index in sorted(rows))
