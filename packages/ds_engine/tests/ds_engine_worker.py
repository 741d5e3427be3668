"""A rank: joins the group, then runs the functions below as the pool asks. Started by ds_engine_testkit.RankPool."""

from __future__ import annotations

import faulthandler
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from ds_engine_testkit import Sample, make_batch, plain_log_prob, token_loss

import ds_engine
from ds_engine import EngineConfig, LossOutput, ZeroEngine

CPU = torch.device("cpu")


def weighted_loss(outputs: Any, batch: Any) -> LossOutput:
    loss = token_loss(outputs.log_probs_K, outputs.entropy_K, batch.columns["weights"])
    metrics = {"entropy_sum": outputs.entropy_K.sum(), "tokens": torch.tensor(float(outputs.log_probs_K.numel()))}
    return LossOutput(loss=loss, metrics=metrics)


def build(model_path: str, config: EngineConfig, **kwargs: Any) -> ZeroEngine:
    return ZeroEngine.from_pretrained(model_path, config, log_prob_fn=plain_log_prob, device=CPU, **kwargs)


def train(
    model_path: str,
    config: EngineConfig,
    steps: list[list[list[Sample]]],
    log_prob_samples: list[list[Sample]] | None = None,
    save_to: str | None = None,
    load_from: str | None = None,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Train on `steps` (of this rank: a list of micro batches each); everything a test may compare."""
    engine = build(model_path, config)
    try:
        if load_from is not None:
            engine.load_checkpoint(load_from, "tag")
        stats = [
            engine.train_mini_batch([make_batch(m) for m in micro], weighted_loss, temperature=temperature)
            for micro in steps
        ]
        outputs = None
        if log_prob_samples is not None:
            outputs = engine.log_probs([make_batch(m) for m in log_prob_samples], temperature=temperature)
        if save_to is not None:
            engine.save_checkpoint(save_to, "tag")
        weights = {name: tensor.clone() for name, tensor in engine.export_parameters(torch.float32)}
        return {"stats": stats, "weights": weights, "outputs": outputs, "memory": engine.memory_stats()}
    finally:
        engine.close()


def main() -> None:
    address, rank, size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    faulthandler.register(signal.SIGUSR1)  # the pool asks for a traceback before it gives up on a rank
    torch.set_num_threads(1)
    ds_engine.init_distributed(
        rank, size, "127.0.0.1", port, CPU, timeout_s=float(sys.argv[5]) if len(sys.argv) > 5 else 60.0
    )
    with Client(address) as connection:
        connection.send_bytes(pickle.dumps(rank))
        while (request := pickle.loads(connection.recv_bytes())) is not None:
            function, kwargs = request
            try:
                result = globals()[function](**kwargs)
            except ds_engine.EngineError as error:
                result = error
            except Exception:
                result = ("crash", traceback.format_exc())
            connection.send_bytes(pickle.dumps(result))
    ds_engine.shutdown_distributed()


if __name__ == "__main__":
    main()
