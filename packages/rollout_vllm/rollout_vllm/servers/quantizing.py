"""Weights that bitsandbytes quantizes while vLLM loads them, on one stream.

bitsandbytes 0.50.2 launches the kernels of `quantize_4bit` on CUDA's default stream, and computes between them on the
current one. Workers of vLLM with tensor parallelism have a stream of their own since their first all-reduce, before
they load weights, and neither stream waits for the other. So kernels read weights that have not arrived and scales
that are not computed, and the server answers with another model. Here vLLM loads on the default stream.

Nothing here imports bitsandbytes, which initializes CUDA: servers fork their engine before.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any


def load_on_one_stream() -> None:
    """Replace `load_weights` of vLLM's loader for bitsandbytes.

    Where vLLM has no such loader (from 0.32 on it is a package of its own), one line says that nothing is replaced.
    """
    try:
        from vllm.model_executor.model_loader.bitsandbytes_loader import BitsAndBytesModelLoader
    except ImportError:
        print("quantized weights: the order in which this vLLM's loader quantizes them was not checked", flush=True)
        return
    import torch

    BitsAndBytesModelLoader.load_weights = on_default_stream(BitsAndBytesModelLoader.load_weights, torch.cuda)


def on_default_stream(load: Callable[..., Any], cuda: Any) -> Callable[..., Any]:
    """`load` on the default stream, after what the current stream has to do and before what follows.

    Args:
        cuda: `torch.cuda`.
    """

    @wraps(load)
    def ordered(*args: Any, **kwargs: Any) -> Any:
        current, default = cuda.current_stream(), cuda.default_stream()
        if current == default:  # entering it would make vLLM keep it, and it cannot capture CUDA graphs
            return load(*args, **kwargs)
        print("quantized weights: they are loaded on CUDA's default stream, as bitsandbytes expects", flush=True)
        default.wait_stream(current)
        with cuda.stream(default):
            loaded = load(*args, **kwargs)
        current.wait_stream(default)
        return loaded

    return ordered
