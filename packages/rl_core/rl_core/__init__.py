"""RL post-training algorithms as pure functions of tensors: advantages, losses, KL, batch math and packing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
