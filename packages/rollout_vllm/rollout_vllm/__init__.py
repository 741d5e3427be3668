"""Rollout with native vLLM HTTP servers: starts and monitors servers, generates groups of samples."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
