"""Test support: tiny models, hypothesis strategies, processes, groups of gloo ranks, and a recorder of collectives.

Tests import it; packages do not. Each module imports torch, transformers or hypothesis only when it needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .collectives import record_calls
    from .covering import covering_table, uncovered_pairs
    from .models import random_model, tiny_config, write_tiny_model, write_word_tokenizer
    from .processes import free_port, run_script, start_process, stop_process, wait_until
    from .properties import list_properties
    from .rank_pool import RankPool, RankServer, serve_ranks
    from .ranks import FinishedRank, fork_ranks, launch_ranks, run_ranks

_MODULES = {
    ".collectives": ("record_calls",),
    ".covering": ("covering_table", "uncovered_pairs"),
    ".models": ("random_model", "tiny_config", "write_tiny_model", "write_word_tokenizer"),
    ".processes": ("free_port", "run_script", "start_process", "stop_process", "wait_until"),
    ".properties": ("list_properties",),
    ".rank_pool": ("RankPool", "RankServer", "serve_ranks"),
    ".ranks": ("FinishedRank", "fork_ranks", "launch_ranks", "run_ranks"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "FinishedRank",
    "RankPool",
    "RankServer",
    "covering_table",
    "fork_ranks",
    "free_port",
    "launch_ranks",
    "list_properties",
    "random_model",
    "record_calls",
    "run_ranks",
    "run_script",
    "serve_ranks",
    "start_process",
    "stop_process",
    "tiny_config",
    "uncovered_pairs",
    "wait_until",
    "write_tiny_model",
    "write_word_tokenizer",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)
