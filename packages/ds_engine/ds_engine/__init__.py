"""A DeepSpeed ZeRO-1/2/3 training engine with exact gradient accumulation on packed sequences."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
