"""Starts and stops torch's profiler on one rank."""

from typing import Any


class RankProfiler:
    """torch's profiler on one rank, from one call to another."""

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        """Begins; CUDA's kernels too where there is a GPU."""
        from torch.profiler import profile

        self._profile = profile()
        self._profile.start()

    def stop(self, path: str) -> None:
        """Ends, and writes a compressed Chrome trace."""
        self._profile.stop()
        self._profile.export_chrome_trace(path)
        self._profile = None
