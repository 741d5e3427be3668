"""Tools for any experiment: command line, typed config, run folder and metrics, report, timing, memory, profiling."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
