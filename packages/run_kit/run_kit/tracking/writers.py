"""TensorBoard event files."""

import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .metrics_table import naming_file


class TensorBoardWriter:
    """Writes scalars as TensorBoard events with TensorBoard's own format, without torch or TensorFlow.

    Raises:
        RunFolderError: by every method, when the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._session = Event, Summary, SessionLog
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        # Not TensorBoard's EventFileWriter: its thread prints the traceback of a full disk and ends.
        self._writer = RecordWriter(self._path.open("ab"))
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Write one event with all scalars of the step; those that are not finite are nan, a gap in the chart."""
        numbers = {name: float(value) if math.isfinite(value) else math.nan for name, value in metrics.items()}
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def rewind(self, step: int, *, last_step: int) -> str:
        """Drop later steps from the charts, as TensorBoard does where a new session starts."""
        self._add(
            self._event(wall_time=time.time(), step=step + 1, session_log=self._session(status=self._session.START))
        )
        return ""

    def _add(self, event: Any) -> None:
        with naming_file(self._path):
            self._writer.write(event.SerializeToString())
            self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        with naming_file(self._path):
            self._writer.close()
