"""Test support: tiny models, hypothesis strategies, processes, groups of gloo ranks, and a recorder of collectives.

Tests import it; packages do not. Each module imports torch, transformers or hypothesis only when it needs them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
