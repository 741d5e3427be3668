"""A rank: joins the group, then runs functions of the workers as ds_engine_testkit.RankPool, which starts it, asks."""

from __future__ import annotations

import faulthandler
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ds_engine_collective_worker
import ds_engine_gradient_worker
import ds_engine_worker
import torch

import ds_engine

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: value
    for module in (ds_engine_worker, ds_engine_gradient_worker, ds_engine_collective_worker)
    for name, value in vars(module).items()
    if getattr(value, "__module__", None) == module.__name__
}
"""What the pool may ask for, by name; imported names belong to the module that defines them."""


def main() -> None:
    address, rank, size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    faulthandler.register(signal.SIGUSR1)  # the pool asks for a traceback before it gives up on a rank
    torch.set_num_threads(1)
    ds_engine.init_distributed(rank, size, "127.0.0.1", port, torch.device("cpu"), timeout_s=300.0)
    with Client(address) as connection:
        connection.send_bytes(pickle.dumps(rank))
        while (request := pickle.loads(connection.recv_bytes())) is not None:
            function, kwargs = request
            try:
                result = FUNCTIONS[function](**kwargs)
            except ds_engine.EngineError as error:
                result = error
            except Exception:
                result = ("crash", traceback.format_exc())
            connection.send_bytes(pickle.dumps(result))
    ds_engine.shutdown_distributed()


if __name__ == "__main__":
    main()
