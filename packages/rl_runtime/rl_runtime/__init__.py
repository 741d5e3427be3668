"""Composes the other packages into training runs: placement, trainer ranks, rollout, the training loop."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
