"""Checkpoint manager: checkpoints appear whole or not at all and are verified at load; Hugging Face exports."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
