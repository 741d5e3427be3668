"""Data files, prompts, tokenization, rewards, and built-in tasks with a tiny model, for RL of LLMs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
