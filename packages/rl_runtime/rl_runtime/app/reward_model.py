"""Checks of a model that scores the policy's token ids, and of reward models in particular, before anything starts."""

from pathlib import Path
from typing import Any

from plinth_base.model_folder import check_model_folder, find_model_folder, stored_tensors
from rl_data import DataError, check_same_vocabulary, load_tokenizer

from ..config import ModelConfig
from ..errors import InputError, naming_key
from ..job_config import JobConfig
from ..launch.cluster import check_cluster
from ..launch.placement import Placement
from ..rollout.reward_services import connect_service
from ..rollout.scoring_config import ScoringConfig
from ..training.engines import check_architectures
from .inputs import policy_tokenizer, read_model_config


def load_scoring_model(
    key: str, name: str, policy: ModelConfig, *, need_weights: bool, remedy: str
) -> tuple[Path, Any]:
    """The folder and the tokenizer of a model that scores the token ids of the policy; `key` names it.

    Raises InputError, with `remedy` at its end if the vocabulary is another one.
    """
    folder = find_model_folder(name)
    with naming_key(key):
        check_model_folder(folder, need_weights=need_weights)
        theirs = load_tokenizer(folder)
    try:
        check_same_vocabulary(policy_tokenizer(policy), theirs)
    except DataError as error:
        problem = f"it cannot score the token ids of model.path ({policy.path}): {error}"
        raise InputError(problem, field=key, value=name, remedy=remedy) from error
    return folder, theirs


_HEAD = "score.weight"
"""The head of transformers' sequence classifiers on causal models; shape [labels, hidden]."""


def check_reward_model(model: ModelConfig, reward: ScoringConfig, *, longest: int) -> None:
    """Refuses a folder that is no reward model for the policy `model`, or a server that does not serve one.

    Args:
        longest: tokens of the longest prompt and response.

    Raises:
        InputError: the folder has another head, vocabulary or length, or the server gives no score.
    """
    if reward.model is None:
        return
    remedy = "(policy and reward model); serve it and let it read text with reward.service=classification or pooling"
    folder, theirs = load_scoring_model(
        "reward.model", reward.model, model, need_weights=reward.model_on_ranks, remedy=remedy
    )
    _check_head(reward, folder)
    _check_length(reward, folder, longest)
    if reward.url is not None:
        _try_service(reward, theirs)


def check_reward_ranks(config: JobConfig, placement: Placement) -> list[str]:
    """Refuses a reward model that the ranks cannot compute or read; returns lines as `check_architectures` does.

    Raises:
        InputError: the engine cannot compute it exactly, or a node has not the folder.
    """
    if not config.reward.model_on_ranks:
        return []
    model = ModelConfig(path=str(find_model_folder(str(config.reward.model))))
    if config.trainer.shared_folder is not None:  # else the ranks get it from this host
        check_cluster(model, config.trainer, placement, key="reward.model")
    engines, on_gpu = {"actor": config.frozen_engine}, placement.on_gpu
    return check_architectures(model, engines, on_gpu=on_gpu, value_heads=("actor",), trained=False, key="reward.model")


def _check_head(reward: ScoringConfig, folder: Path) -> None:
    """One label, from weights that the folder has: an engine would draw a missing head at random."""
    settings = read_model_config(folder, key="reward.model")
    kinds = settings.get("architectures") or []
    if not any(str(kind).endswith("ForSequenceClassification") for kind in kinds):
        raise InputError(
            f"its architecture is {', '.join(map(str, kinds)) or 'unknown'}",
            field="reward.model",
            value=reward.model,
            allowed="a sequence-classification model (…ForSequenceClassification), saved by save_pretrained",
        )
    num_labels = len(settings["id2label"]) if "id2label" in settings else settings.get("num_labels", 2)
    if num_labels != 1:
        raise InputError(
            f"it has {num_labels} labels",
            field="reward.model",
            value=reward.model,
            allowed="a model with one label, whose output is the score",
            remedy="serve a classifier with reward.url and reward.service=classification",
        )
    with naming_key("reward.model"):
        names = stored_tensors(folder)
    if reward.model_on_ranks and names and _HEAD not in names:
        problem, allowed = f"its weights lack {_HEAD}", "a trained reward model"
        raise InputError(problem, field="reward.model", value=reward.model, allowed=allowed)


def _check_length(reward: ScoringConfig, folder: Path, longest: int) -> None:
    most = read_model_config(folder, key="reward.model").get("max_position_embeddings")
    # One more than is scored: see `training.reward_model.to_be_scored`.
    if isinstance(most, int) and longest + 1 > most:
        raise InputError(
            f"it reads {most} tokens",
            field="reward.model",
            value=reward.model,
            allowed=f"a model that reads more than the longest prompt and response ({longest} tokens: "
            "data.max_prompt_length, sampling.max_tokens and validation.max_tokens)",
        )


def _try_service(reward: ScoringConfig, tokenizer: Any) -> None:
    """Asks for one score."""
    url = str(reward.url)
    with connect_service(reward, url) as service:
        outcome = service.submit([tokenizer.eos_token_id]).result()
    if outcome.score is None:
        raise InputError(
            f"it gives no score: {outcome.message}",
            field="reward.url",
            value=url,
            remedy=f"start it with `vllm serve {reward.model} --runner pooling`",
        )
