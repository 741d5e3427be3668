"""Pushes model weights from a trainer into running vLLM servers: bucketed, verified, on all servers or none."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
