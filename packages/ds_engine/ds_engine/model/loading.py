"""Loads a Hugging Face model for a ZeRO stage: complete at stages 1 and 2, sharded while it is read at stage 3."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from plinth_base.model_folder import stored_tensors

from ..errors import EngineConfigError, ModelError
from ..upstream import FENCE, auto_class, warn_on_first_rank
from .attention import attention_options, register_packed_attention
from .compilation import compile_layers
from .experts import use_experts
from .folder_names import drop_unused_conversions
from .lora import add_adapters
from .matching import Operations, check_match, match_servers
from .nf4 import nf4_weights, quantize_base, round_to_nf4
from .packed_model import install_packed_forward, mark_way
from .parts import VALUE_HEAD, find_backbone
from .recomputation import enable_checkpointing
from .router_replay import RouterReplay, install_replay
from .sequence_parallel import check_model_heads
from .small_copy import turn_off_dropout
from .tiled_mlp import tile_mlps
from .trial import Trial, silenced_transformers, try_model, try_replay
from .vision import vision_parameters
from .weights import check_weights, read_config, refuse_incomplete

if TYPE_CHECKING:
    from ..batch import Head, LogProbFn
    from ..config import EngineConfig, OffloadConfig

BUFFERS = FENCE.patch(
    name="fp32 buffers of stage 3",
    reason="DeepSpeed rounds rotary frequencies to the model's dtype, and positions shift",
    otherwise="refused",
    reads={
        "torch.nn:Module": ("_non_persistent_buffers_set",),
        "transformers:PreTrainedModel": ("_init_weights(module)",),
    },
)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype named bfloat16, float16 or float32."""
    return cast("torch.dtype", getattr(torch, name))


def check_offload(offload: OffloadConfig) -> None:
    """Check, before anything is loaded, that offload can work here, and warn of locks that would block it.

    Raises:
        EngineConfigError: `nvme_path` is not a folder, or DeepSpeed's asynchronous I/O cannot be built here.
    """
    if offload.optimizer != "none":  # its Adam is an operator that DeepSpeed compiles when it is first used
        for lock in abandoned_locks():
            logging.getLogger("ds_engine").warning(
                "torch waits until %s is gone, and no process of this host holds it: if no other host compiles there, "
                "a killed compilation left it; delete it",
                lock,
            )
    if offload.nvme_path is None:
        return
    if not Path(offload.nvme_path).is_dir():
        raise EngineConfigError(field="zero.offload.nvme_path", value=offload.nvme_path, allowed="a folder")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise EngineConfigError(
            "nvme needs DeepSpeed's asynchronous I/O, which needs libaio with headers (Debian, Ubuntu: libaio-dev) and "
            "a C++ compiler",
            field="zero.offload",
            remedy="install them, or offload to cpu",
        )


def abandoned_locks() -> list[Path]:
    """Locks in torch's folder of compiled operators that no process of this host has open.

    The process that compiles an operator keeps its lock open (torch.utils.file_baton) and deletes it at the end, unless
    it is killed. Others wait for that without limit and without a message. Processes of other users and other hosts are
    not visible.
    """
    from torch.utils.cpp_extension import get_default_build_root

    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        candidates = Path(folder).glob("*/lock")
    else:
        version = f"py{sys.version_info.major}{sys.version_info.minor}"
        candidates = Path(get_default_build_root()).glob(f"{version}_*/*/lock")
    locks = {str(path.resolve()): path for path in sorted(candidates)}
    held = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*") if locks else ():
        with suppress(OSError):
            held.add(os.readlink(descriptor))
    return [path for name, path in locks.items() if name not in held and path.exists()]


def load_model(
    model_path: str,
    config: EngineConfig,
    *,
    device: torch.device,
    ds_config: dict[str, Any],
    head: Head = "lm",
    new_head: bool = True,
) -> nn.Module:
    """Try the architecture, then load the model in `config.dtype` on `device` (stage 3: sharded over the ranks).

    It has packed attention, or upstream's own where only padded rows are exact (trial.py).
    With `lora.base_format="nf4"` the linear layers are quantized one at a time before the model moves to the device.

    Args:
        head: "lm" loads the causal LM unchanged. "value" replaces the LM head by a linear layer to one number per
            token. It is read from the folder if present, otherwise drawn with `config.seed` from a small normal
            distribution, so that values start near zero.
        new_head: False refuses a folder without the value head.

    Raises:
        ModelError: the folder does not exist, transformers cannot load it with this head, or the engine cannot compute
            this architecture exactly.
        EngineConfigError: a setting does not suit the architecture.
    """
    model_config = read_config(model_path)
    trial = _checked_trial(model_config, config, head, device)
    if trial.way == "rows":
        warn_on_first_rank(str(trial))
    else:
        register_packed_attention()
    if not config.dropout and (rates := turn_off_dropout(model_config)):
        warn_on_first_rank(
            f"{trial.architecture}: trained without its {', '.join(f'{k} {v:g}' for k, v in rates.items())}"
        )
    options = {"config": model_config}
    if trial.way == "packed":
        options |= attention_options(model_config)
    torch.manual_seed(config.seed)
    sharded = config.zero.stage == 3
    sharding: Any = None
    if sharded:
        from transformers.integrations import HfDeepSpeedConfig

        sharding = HfDeepSpeedConfig(ds_config)  # while it exists, transformers, with a weak reference, shards
    drawn_with = config.seed if new_head else None
    model = _read_folder(model_path, torch_dtype(config.model_dtype), head, options, seed=drawn_with)
    del sharding
    if config.lora is not None and config.lora.base_format == "nf4":
        quantize_base(model, device=device)
    use_experts(model, config.experts, device=device)
    mark_way(model, rows=trial.way == "rows", shares_prefixes=not trial.why_not_shared, sees_images=trial.sees)
    if not sharded:
        return model.to(device)
    drop_unused_conversions(model)
    _restore_fp32_buffers(model)
    return model


def nf4_base(model_path: str, config: EngineConfig) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """A function from (name, tensor) of the folder to the tensor that an engine with `lora.base_format="nf4"` uses.

    It rounds the weights of the backbone's linear layers to NF4 and back, on the tensor's device, and returns the
    others unchanged. Starts no process and loads no weights.

    Raises:
        ModelError: the configuration cannot be read, or the folder has other names than the model.
        ModelFolderError: a weight file cannot be read.
    """
    model_config = read_config(model_path)
    with torch.device("meta"):
        model = auto_class(model_config, "lm").from_config(model_config, trust_remote_code=False)
    rounded, dtype = set(nf4_weights(model)), torch_dtype(config.model_dtype)
    if missing := sorted(rounded - stored_tensors(model_path).keys()):
        raise ModelError(
            f"it has no {missing[0]} ({len(missing)} of {len(rounded)} linear layers): its tensors have other names "
            "than the model's, so it is not known which ones the engine rounds to NF4",
            field="model_path",
            value=model_path,
        )
    return lambda name, tensor: round_to_nf4(tensor, dtype) if name in rounded else tensor


def check_model(
    model_path: str,
    config: EngineConfig,
    *,
    head: Head = "lm",
    new_head: bool = True,
    report: Callable[[str], None] = warn_on_first_rank,
) -> Trial:
    """Check that the folder has all weights, and that the engine computes the model exactly; says how.

    Needs no GPU and no process group, and reads no weights (see `check_finite`).

    Args:
        new_head: a value head may be missing, as for `load_model`.
        report: gets a line about tensors in the files that the model has no weight for.

    Raises:
        ModelError: transformers does not know the model, a weight is missing, has another shape or is in a damaged
            file, or the engine cannot compute the architecture exactly.
        UntriedModelError: the architecture cannot be tried here; a rank with a GPU tries again when it loads the model.
        EngineConfigError: a setting does not suit the architecture.
    """
    check_weights(model_path, head=head, new_head=new_head, report=report)
    return _checked_trial(read_config(model_path), config, head, torch.device("cpu"))


def _checked_trial(model_config: Any, config: EngineConfig, head: Head, device: torch.device) -> Trial:
    check_model_heads(model_config, config.sequence_parallel)
    if config.match_servers:
        check_match(model_config)
    trial = try_model(model_config, head=head, device=device)
    if trial.recurrent and config.sequence_parallel > 1:
        problem = f"a recurrence runs along all tokens of a sequence, but {trial}"
        raise EngineConfigError(problem, field="sequence_parallel", value=config.sequence_parallel, allowed="1")
    for name, default in (("sequence_parallel", 1), ("compile", False), ("attention", "auto")):
        if trial.way == "rows" and (getattr(config, name) or default) != default:
            problem = f"it needs packed sequences, but {trial}"
            raise EngineConfigError(problem, field=name, value=getattr(config, name), allowed=str(default))
    if config.train_vision and not trial.sees:
        problem = f"it needs a vision tower that sees images exactly, but {trial}"
        raise EngineConfigError(problem, field="train_vision", value=True, allowed="false")
    if config.tiled_mlp and trial.why_not_tiled:
        problem = f"{trial.architecture} in tiles: {trial.why_not_tiled}"
        raise EngineConfigError(problem, field="tiled_mlp", value=config.tiled_mlp, allowed="0")
    if config.router_replay != "off":
        try_replay(model_config, trial, device=device)
    return trial


def prepare_model(
    module: nn.Module,
    config: EngineConfig,
    *,
    log_prob_fn: LogProbFn | None,
    device: torch.device,
    kernel: str,
    trainable: bool,
    head: Head,
    operations: Operations | None = None,
) -> RouterReplay | None:
    """Prepare a loaded model in place: adapters, activation checkpointing, compilation, tiles and the packed forward.

    Returns:
        The model's routes, with `config.router_replay`.

    Args:
        kernel: attention kernel, see `choose_kernel`.
        operations: those of the servers; required with `match_servers`.

    Raises:
        ModelError: the architecture does not support one of these.
        EngineConfigError: a setting cannot work here.
    """
    if config.match_servers and operations is None:
        raise EngineConfigError("it needs their operations", field="match_servers", value=True)
    check_model_heads(module.config, config.sequence_parallel)
    _, backbone = find_backbone(module)
    if not config.train_vision and backbone is not None:
        for parameter in vision_parameters(backbone):
            parameter.requires_grad_(False)
    if trainable and config.lora is not None:
        add_adapters(module, config.lora, head=head, seed=config.seed, vision=config.train_vision)
    if config.gradient_checkpointing:
        enable_checkpointing(module, to_cpu=config.checkpoint_to_cpu)
    if operations is not None:
        match_servers(module, operations)
    if config.compile:
        tiles = config.tiled_mlp or 0
        compile_layers(module, device_type=device.type, kernel=kernel, stage=config.zero.stage, tiled_mlp=tiles)
    elif config.tiled_mlp:
        tile_mlps(module, config.tiled_mlp)
    if log_prob_fn is not None and config.keep_probabilities:
        log_prob_fn = partial(log_prob_fn, keep_bytes=2**62)  # all
    install_packed_forward(
        module, log_prob_fn if head == "lm" else None, count_calls=not config.compile, operations=operations
    )
    if not trainable:
        module.requires_grad_(False)
    return None if config.router_replay == "off" else install_replay(module)


def _read_folder(
    model_path: str, dtype: torch.dtype, head: Head, options: dict[str, Any], *, seed: int | None
) -> nn.Module:
    """`seed`: of a value head that the folder lacks; None: such a folder is refused."""
    # Without the option, transformers asks at the terminal whether to run code of the folder.
    options = {"dtype": dtype, "trust_remote_code": False, **options}
    kind = auto_class(options["config"], head)
    if head == "value":
        options["config"].num_labels = 1
    try:
        with silenced_transformers() if head == "value" else nullcontext():  # a missing head is normal for a new critic
            model, info = kind.from_pretrained(model_path, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        wanted = "causal language model" if head == "lm" else "model with a value head"
        raise ModelError(f"cannot load a {wanted}: {error}", field="model_path", value=model_path) from error
    if refuse_incomplete(model_path, info, new_head=head == "value" and seed is not None):
        assert seed is not None
        _draw_value_head(model.get_parameter(f"{VALUE_HEAD}.weight"), seed)
    return cast("nn.Module", model)


def _draw_value_head(weight_1H: nn.Parameter, seed: int) -> None:
    """Initialize the head identically on every rank and at every stage, which transformers does not."""
    import deepspeed

    hidden = int(getattr(weight_1H, "ds_numel", weight_1H.numel()))
    drawn_1H = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)) / (hidden + 1)
    sharded = hasattr(weight_1H, "ds_id")
    with deepspeed.zero.GatheredParameters([weight_1H], modifier_rank=0, enabled=sharded), torch.no_grad():
        weight_1H.copy_(drawn_1H)


def _restore_fp32_buffers(model: Any) -> None:
    """Recompute in fp32 the buffers that stage 3 rounded to the model's dtype, mainly the rotary frequencies.

    At stage 3 DeepSpeed casts every floating-point tensor created during construction to the model's dtype. In bf16,
    with 8 bits of precision, rotary frequencies shift the angles of far positions by whole radians.
    """
    BUFFERS.check()
    for module in model.modules():
        buffers = {
            name: b for name, b in module.named_buffers(recurse=False) if name in module._non_persistent_buffers_set
        }
        rounded = {name: b for name, b in buffers.items() if b.is_floating_point() and b.dtype != torch.float32}
        if not rounded or any(True for _ in module.parameters(recurse=False)):
            continue
        for name, buffer in rounded.items():
            module.register_buffer(name, buffer.float(), persistent=False)
        model._init_weights(module)
