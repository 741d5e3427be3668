"""torch's profiler on one rank."""

from typing import Any


class RankProfiler:
    """Starts and stops torch's profiler from separate calls."""

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        """Starts to record operators and, with a GPU, CUDA kernels."""
        from torch.profiler import profile

        self._profile = profile()
        self._profile.start()

    def stop(self, path: str) -> None:
        """Stops, and writes a Chrome trace, gzipped if the name ends in .gz."""
        self._profile.stop()
        self._profile.export_chrome_trace(path)
        self._profile = None
