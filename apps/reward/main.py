"""Reward models: `plinth reward [preset=NAME] [section.key=value ...]`, `--help all` lists all keys.

A value head scores a response at its last token, and learns from pairs (docs/preference.md). A step draws
`supervised.batch_size` pairs, scores both responses of each in one packed row, and descends on the Bradley-Terry loss;
the column `margin` says how much better the chosen response is. Every `trainer.test_freq` steps the accuracy on
held-out pairs is measured. `trainer.resume=auto` continues a run from its newest checkpoint, bit for bit.

The model is written to `<run folder>/model` as a sequence classifier with one label, which transformers loads and
`vllm serve --runner pooling` serves. Without a model and data the app runs the preset `demo`.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import ds_engine
import rl_core
import rl_runtime
from apps.reward.config import RewardConfig

if TYPE_CHECKING:
    import torch

    from rl_data import PreferencePair


def reward_loss(
    outputs: "ds_engine.ValueOutputs", batch: "rl_core.Batch", *, num_pairs: int, center_coef: float
) -> "ds_engine.LossOutput":
    """The micro batch's share of the mean Bradley-Terry loss over all `num_pairs` pairs of the step."""
    chosen_P, rejected_P = rl_runtime.of_pairs(outputs.values_K)
    margins_P, _ = rl_runtime.of_pairs(batch.per_sequence["margins"])
    loss_P = rl_core.bradley_terry_loss(chosen_P, rejected_P, margins_P, center_coef=center_coef)
    shares = {name: values_P.sum() / num_pairs for name, values_P in compare(chosen_P, rejected_P).items()}
    return ds_engine.LossOutput(loss=loss_P.sum() / num_pairs, metrics=shares)


def compare(chosen_P: "torch.Tensor", rejected_P: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """Per pair: 1 where the chosen response has the higher score (1/2 if equal), the difference, and the mean."""
    higher_P = (chosen_P > rejected_P).float() + 0.5 * (chosen_P == rejected_P).float()
    return {"accuracy": higher_P, "margin": chosen_P - rejected_P, "score": (chosen_P + rejected_P) / 2}


def learn(
    model: "rl_runtime.ModelHandle", pairs: "Sequence[PreferencePair]", *, config: RewardConfig
) -> "ds_engine.StepStats":
    """One optimizer step on pairs."""
    loss = partial(reward_loss, num_pairs=len(pairs), center_coef=config.algorithm.center_coef)
    batch = rl_runtime.score_batch(rl_runtime.responses_of(pairs), {"margins": rl_runtime.margins_of(pairs)})
    with rl_runtime.TrainBatch(batch, group_size=2) as train_batch:
        return model.update(train_batch.mini_batches[0], loss)


def measure(
    model: "rl_runtime.ModelHandle", *, pairs: "Sequence[PreferencePair]", config: RewardConfig
) -> dict[str, float]:
    """Loss, accuracy and mean scores on held-out pairs."""
    responses = rl_runtime.responses_of(pairs)
    scores_S = rl_runtime.scores(model, responses, batch_size=2 * config.supervised.batch_size)
    chosen_P, rejected_P = rl_runtime.of_pairs(scores_S)
    margins_P, _ = rl_runtime.of_pairs(rl_runtime.margins_of(pairs))
    loss_P = rl_core.bradley_terry_loss(chosen_P, rejected_P, margins_P, center_coef=config.algorithm.center_coef)
    metrics = {"loss": loss_P, **compare(chosen_P, rejected_P)}
    return {name: float(values_P.mean()) for name, values_P in metrics.items()}


def compose(run: "rl_runtime.SupervisedRun", config: RewardConfig) -> "rl_runtime.Objective":
    """The objective: tell the better response of a pair."""
    pairs = run.inputs.held_out
    measured = partial(measure, pairs=pairs, config=config)
    held_out = rl_runtime.HeldOut((), run.inputs.tokenizer, run.config.supervised, measured)
    return rl_runtime.Objective(
        name="reward", learn=partial(learn, config=config), held_out=held_out if pairs else None
    )


def check(config: RewardConfig) -> "rl_runtime.JobPlan":
    """Refuses settings that cannot work before any process starts; plans the devices and the resume."""
    return rl_runtime.check_run(config, head="value")


def main(config: RewardConfig) -> None:
    """Trains on the pairs and writes the model, also when a signal stops it before the last step."""
    resolved = rl_runtime.resolve_supervised(config)
    config = resolved.config
    rl_runtime.run_supervised(resolved, check(config), partial(compose, config=config), head="value")


cli = partial(rl_runtime.run_job_cli, RewardConfig, main)
"""Runs the app from its command line."""


if __name__ == "__main__":
    cli()
