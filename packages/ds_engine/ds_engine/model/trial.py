"""Tries an architecture on a small random copy before it is trained: packed must equal each sequence alone.

Two sequences are computed by upstream's own forward, each alone with full logits, and by ours, packed, packed with
their shared prefix computed once, with tiled MLPs, and, where packed is not exact, as padded rows. Outputs and all
gradients must be equal. Ours runs in training mode and upstream's in evaluation mode, so that noise in training is
found too. The copy is in fp32 on the CPU, or on the GPU if its kernels need one.
"""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..errors import ModelError, UntriedModelError
from ..simple import SimpleBatch, dense_log_prob
from ..upstream import auto_class, transformers_message
from .attention import attention_options, register_packed_attention
from .experts import use_experts
from .packed_model import ROWS, PackedInputs, install_packed_forward, packed_inputs
from .parts import find_backbone, vision_names
from .recurrence import has_kernels, recurrent_line
from .router_replay import install_replay, replay_refusal
from .small_copy import randomize, small_config
from .tiled_mlp import tile_mlps
from .vision import Vision, made_up_images

if TYPE_CHECKING:
    from ..batch import Head

CPU = torch.device("cpu")
TOLERANCE = 1e-3
"""Largest difference of an output (from 10 nats on: relative to a tenth of the largest), and of a gradient relative to
the largest of its parameter (at least one percent of the largest of all). Rounding gives up to 1e-4, an unknown border
1e-2 and more."""
TOLERANCE_ON_GPU = 1e-2
"""The same for kernels that round fp32 inputs to tf32."""
LENGTHS = (13, 8)
"""Tokens of the two sequences: both are longer than the copy's windows, one than its `ORIGINAL_LENGTH`."""
NUM_SHARED = 3
"""Tokens with which both begin."""
_TILE = 4
"""Tokens of a tile of MLPs: several in the packed sequences, and the last one is shorter."""
_MAX_PARAMETERS = 60_000_000


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The way in which an architecture is computed exactly."""

    architecture: str
    way: Literal["packed", "rows"]
    """packed: one row of all sequences. rows: one padded row per sequence, by upstream's own forward."""
    why_not_packed: str
    """Empty if packed."""
    why_not_shared: str
    """Empty if a prefix that packed sequences share can be computed once."""
    recurrent: str
    """Recurrent layers that get the borders of packed sequences, and by which code; empty if there are none."""
    why_not_tiled: str
    """Empty if its MLPs can run over tiles of tokens."""
    seconds: float
    """Duration of the trial."""
    sees: bool = False
    """True for a vision-language model whose packed sequences with images equal each one alone."""
    why_blind: str = ""
    """Set if a vision-language model is not exact with images."""
    joins_images: bool = False
    """True if the tokens of an image attend to later tokens of the same image (Gemma 3)."""

    def __str__(self) -> str:
        cost = f"tried on a small random copy in {self.seconds:.1f} s"
        if self.way == "packed":
            recurrent = f", {self.recurrent}" if self.recurrent else ""
            shared = f"; without shared prefixes ({self.why_not_shared})" if self.why_not_shared else ""
            seen = ", with images" if self.sees else f"; without images ({self.why_blind})" if self.why_blind else ""
            return f"{self.architecture}: packed sequences equal each one alone{seen}{recurrent}{shared} ({cost})"
        return (
            f"{self.architecture}: each sequence is a padded row of transformers' own forward, exact but slower, as "
            f"packed {self.why_not_packed} ({cost})"
        )


def try_model(config: Any, *, head: Head = "lm", device: torch.device = CPU) -> Trial:
    """Try the architecture of a transformers configuration; later calls in this process return the same trial.

    Args:
        device: where the copy is computed if it cannot be on the CPU, or if recurrent layers use kernels there.

    Raises:
        ModelError: neither packed sequences nor padded rows equal each sequence alone.
        UntriedModelError: no small copy can be built, or computed on these devices.
    """
    try:
        trial = _try_once(config, head, CPU)
    except UntriedModelError:
        if device == CPU:
            raise
    else:
        if device == CPU or not (trial.recurrent and has_kernels()):
            return trial
    return _try_once(config, head, device)


def _try_once(config: Any, head: Head, device: torch.device) -> Trial:
    content = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "dtype", "architectures")}
    key = f"{type(config).__name__} {sorted(content.items(), key=str)}", head, device
    if key not in TRIALS:
        with silenced_transformers(), warnings.catch_warnings(action="ignore"), one_thread():
            TRIALS[key] = _try(config, head, device)
    return TRIALS[key]


TRIALS: dict[tuple[str, Head, torch.device], Trial] = {}
"""Trials of this process by configuration, head and device. A process with the same libraries may take them over."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: for little work, threads take several times as long to meet as they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _try(config: Any, head: Head, device: torch.device) -> Trial:
    started = time.monotonic()
    with torch.random.fork_rng([] if device == CPU else [device]), torch.enable_grad(), device:
        torch.manual_seed(0)
        small, model = _reference(config, head)
        architecture = type(model).__name__
        sequences = _sequences(model)
        if not _is_causal(model, sequences[0], head):
            raise ModelError(f"{architecture} cannot be trained: the log-prob of a token depends on later tokens")
        if noise := {name: value for name, value in small.to_dict().items() if "jitter" in name and value}:
            field, value = next(iter(noise.items()))
            problem = f"{architecture} cannot be trained: its experts are random in training"
            raise ModelError(problem, field=field, value=value, allowed="0")
        expected = _outputs_and_gradients(model, [_alone(model, ids, head) for ids in sequences])
        case = _Case(small, model, head, sequences)
        reasons = {}
        for way in ("packed", "rows"):
            reasons[way] = _inexactness(way, case, expected)
            if not reasons[way]:
                is_packed = way == "packed"
                has_vision = bool(vision_names(model))
                why_blind = f"packed {reasons['packed']}" if has_vision else ""
                if has_vision and is_packed:
                    why_blind = _blindness(small, model, head)
                vision = Vision.of(model) if has_vision and not why_blind else None
                return Trial(
                    architecture=architecture,
                    way=cast("Any", way),
                    why_not_packed=reasons["packed"],
                    why_not_shared=_inexactness("shared", case, expected)
                    if is_packed
                    else f"packed {reasons['packed']}",
                    recurrent=recurrent_line(model) if is_packed else "",
                    why_not_tiled=_inexactness(way, case, expected, tile=_TILE),
                    sees=vision is not None,
                    why_blind=why_blind,
                    joins_images=vision is not None and vision.has_blocks,
                    seconds=time.monotonic() - started,
                )
    raise ModelError(f"{architecture} cannot be trained: packed {reasons['packed']}; in padded rows {reasons['rows']}")


class _Case(NamedTuple):
    """Sequences, with images if there are any, that copies of the reference compute in several ways."""

    small: Any
    """Its configuration."""
    reference: Any
    head: Head
    sequences: list[Tensor]
    images: list[Any] | None = None


Result = tuple[Tensor, Mapping[str, Tensor]]
"""Outputs of all sequences, and the gradients of a weighted sum of them."""


def _blindness(small: Any, reference: Any, head: Head) -> str:
    """Reason why packed sequences with images do not equal each one alone; empty if they do."""
    try:
        sequences, images = _with_images(reference)
        alone = [_alone(reference, ids, head, each) for ids, each in zip(sequences, images, strict=True)]
        expected = _outputs_and_gradients(reference, alone)
    except Exception as error:  # whatever a model raises whose images are of a kind that is not known here
        return f"upstream's own forward fails with {type(error).__name__}: {transformers_message(error)[:200]}"
    return _inexactness("packed", _Case(small, reference, head, sequences, images), expected)


def _with_images(model: Any) -> tuple[list[Tensor], list[Any]]:
    """Token ids of two sequences, one with two images and one with one; and their images."""
    vision = Vision.of(model)
    assert vision is not None
    _, backbone = find_backbone(model)
    device = next(model.parameters()).device
    sequences, images = [], []
    for ids, sizes in zip(_sequences(model), (((6, 5), (2, 3)), ((3, 4),)), strict=True):
        parts, shown = list(ids.split([4, 3, len(ids) - 7])), []
        each = made_up_images(model, sizes=sizes)
        with torch.no_grad():
            inputs = {name: value.to(device) for name, value in each.items()}
            features = cast("Any", backbone).get_image_features(**inputs, return_dict=True).pooler_output
        for part, feature in zip(parts, features, strict=False):
            shown += [part, ids.new_full((len(feature),), vision.placeholder)]
        sequences.append(torch.cat([*shown, *parts[len(sizes) :]]))
        images.append(each)
    return sequences, images


def _inexactness(way: str, case: _Case, expected: Result, *, tile: int = 0) -> str:
    """Reason why sequences computed in this way do not equal each one alone; empty if they do."""
    try:
        model, inputs = _copy_for(way, case, tile=tile)
        outputs, gradients = _outputs_and_gradients(model, [model(packed=inputs)])
    except ModelError as error:
        return f"it is refused: {error}"
    except Exception as error:  # whatever a model raises that does not know our attention, or our head's inputs
        return f"it fails with {type(error).__name__}: {str(error)[:200]}"
    tolerance = TOLERANCE if outputs.device == CPU else TOLERANCE_ON_GPU
    difference = float((outputs - expected[0]).abs().max())
    if not difference <= tolerance * max(1.0, 0.1 * float(expected[0].abs().max())):
        outputs_name = "log-probs" if case.head == "lm" else "values"
        return f"its {outputs_name} differ by {difference:.1g} from each sequence alone"
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        difference = float((gradients.get(name, torch.zeros(())) - gradient).abs().max())
        if not difference <= tolerance * max(0.01 * largest, float(gradient.abs().max())):
            return f"the gradient of {name} differs by {difference:.1g} from each sequence alone"
    return ""


def _copy_for(way: str, case: _Case, *, tile: int = 0) -> tuple[nn.Module, PackedInputs]:
    """A model with the weights of the reference that computes sequences in this way, and their inputs."""
    small, reference, head, sequences, images = case
    register_packed_attention()
    options = {} if way == "rows" else attention_options(small)
    model = _build(small, head, **options)
    model.load_state_dict(reference.state_dict())
    use_experts(model, "auto", device=sequences[0].device)
    if tile:
        tile_mlps(model, tile)
    install_packed_forward(model.train(), dense_log_prob if head == "lm" else None)
    with CPU:
        batch = SimpleBatch.pack([_split(ids, head) for ids in sequences], images=images or ())
        kernel = ROWS if way == "rows" else "sdpa"
        prefixes = _SHARED if way == "shared" else None
        vision = Vision.of(model) if images else None
        inputs, _ = packed_inputs(batch, device=sequences[0].device, kernel=kernel, prefixes=prefixes, vision=vision)
    return model, inputs


def try_replay(config: Any, trial: Trial, *, device: torch.device = CPU) -> None:
    """Try on a small random copy that replayed routes are the model's only source of routes.

    Raises:
        EngineConfigError: the model has no routers that can replay, its own routes change an output or gradient, or
            other routes of a layer change none.
    """
    with (
        torch.random.fork_rng([] if device == CPU else [device]),
        torch.enable_grad(),
        silenced_transformers(),
        device,
    ):
        torch.manual_seed(0)
        small, reference = _reference(config, "lm")
        model, inputs = _copy_for(trial.way, _Case(small, reference, "lm", _sequences(reference)))
        replay = install_replay(model)
        replay.begin(record=True)
        outputs, gradients = _outputs_and_gradients(model, [model(packed=inputs)])
        own_PLk = replay.take_recorded()
        replay.begin(own_PLk)
        again = _outputs_and_gradients(model, [model(packed=inputs)])
        # Gradients on a GPU are sums in any order.
        same = all(again[1][name].allclose(gradient, rtol=1e-4, atol=1e-6) for name, gradient in gradients.items())
        if not (same and again[0].equal(outputs)):
            raise replay_refusal(f"{trial.architecture}: replaying its own routes changes its outputs or gradients")
        for layer, router in replay.routers.items():
            others_PLk = own_PLk.clone()
            others_PLk[:, layer] = (own_PLk[:, layer] + 1) % int(router.num_experts)
            replay.begin(others_PLk)
            with torch.no_grad():
                if model(packed=inputs).equal(outputs):
                    raise replay_refusal(f"{trial.architecture}: routes of layer {layer} change no output")


def _build(config: Any, head: Head, **options: Any) -> Any:
    kind = auto_class(config, head)
    return kind.from_config(copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False, **options)


def _reference(config: Any, head: Head) -> tuple[Any, Any]:
    """(configuration, upstream's model in evaluation mode) of the small random copy.

    Raises:
        UntriedModelError: it cannot be built, or its outputs are not finite.
    """
    failures = []
    for widths in ("fixed", "scaled", "kept"):
        try:
            small = small_config(config, widths=cast("Any", widths))
            small.num_labels = 1
            with torch.device("meta"):
                size = sum(p.numel() for p in _build(small, head).parameters())
            if size > _MAX_PARAMETERS:
                failures.append(f"a copy has {size:,} parameters")
                continue
            model = _build(small, head).eval()
            use_experts(model, "loop", device=next(model.parameters()).device)
            randomize(model)
            with torch.no_grad():
                outputs = [_alone(model, ids, head) for ids in _sequences(model)]
        except Exception as error:  # whatever a model raises that is not made for these sizes
            failures.append(f"{type(error).__name__}: {transformers_message(error)[:300]}")
            continue
        if all(bool(output.isfinite().all()) for output in outputs):
            return small, model
        failures.append("its outputs are not finite")
    reasons = "; ".join(dict.fromkeys(failures))
    raise UntriedModelError(f"no small copy of {type(config).__name__} can be tried: {reasons}")


def _sequences(model: Any) -> list[Tensor]:
    """Token ids of the two sequences, without padding tokens."""
    config = model.config.get_text_config()
    generator = torch.Generator("cpu").manual_seed(1)
    ids_T = torch.randint(4, int(config.vocab_size), (sum(LENGTHS),), generator=generator, device=CPU)
    ids_T[ids_T == getattr(config, "pad_token_id", None)] = 3
    ids_T[LENGTHS[0] : LENGTHS[0] + NUM_SHARED] = ids_T[:NUM_SHARED]
    return list(ids_T.to(next(model.parameters()).device).split(list(LENGTHS)))


_SHARED: Any = SimpleNamespace(
    computed_U=torch.tensor([*range(LENGTHS[0]), *range(LENGTHS[0] + NUM_SHARED, sum(LENGTHS))]),
    place_T=torch.tensor([*range(LENGTHS[0]), *range(NUM_SHARED), *range(LENGTHS[0], sum(LENGTHS) - NUM_SHARED)]),
    cu_seqlens_N1=torch.tensor([0, NUM_SHARED, LENGTHS[0], sum(LENGTHS) - NUM_SHARED]),
    parents_N=(-1, 0, 0),
)
"""The two sequences as a tree: their prefix, then what follows it in each."""


def _split(ids_T: Tensor, head: Head) -> tuple[list[int], list[int]]:
    """Prompt and response: every token is a target but the first one, for a value head only the last one."""
    num_prompt = 1 if head == "lm" else len(ids_T) - 1
    return ids_T[:num_prompt].tolist(), ids_T[num_prompt:].tolist()


def _alone(model: Any, ids_T: Tensor, head: Head, images: Mapping[str, Tensor] | None = None) -> Tensor:
    """Upstream's outputs for the targets of one sequence: [2, K] log-probs and entropies, or values [1, 1]."""
    if head == "value":
        ids_T = ids_T[:-1]
    inputs: dict[str, Tensor] = {}
    if images is not None:
        kinds = (ids_T == model.config.image_token_id).int()[None]
        backbone: Any = find_backbone(model)[1]
        names = inspect.signature(type(backbone).forward).parameters
        inputs = {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in names}
        inputs |= {name: value.to(ids_T.device) for name, value in images.items()}
    logits = model(input_ids=ids_T[None], use_cache=False, **inputs).logits
    if head == "value":
        return cast("Tensor", logits)
    log_p_KV = logits[0, :-1].log_softmax(-1)
    return torch.stack((log_p_KV.gather(1, ids_T[1:, None])[:, 0], -(log_p_KV.exp() * log_p_KV).sum(-1)))


def _is_causal(model: Any, ids_T: Tensor, head: Head) -> bool:
    """True if the last token leaves the outputs before it as they are. Upstream's values are only those at the end."""
    if head == "value":
        return True
    other_T = torch.cat((ids_T[:-1], ids_T[-1:] - 1))
    with torch.no_grad():
        before, after = (_alone(model, each, head)[:, :-1] for each in (ids_T, other_T))
    return bool((before - after).abs().max() <= TOLERANCE_ON_GPU)


def _outputs_and_gradients(model: nn.Module, outputs: list[Tensor]) -> Result:
    rows_RK = torch.cat(outputs, dim=1)
    weights_RK = torch.linspace(-1.0, 1.3, rows_RK.numel()).view_as(rows_RK)
    model.zero_grad()
    (rows_RK * weights_RK).sum().backward()
    return rows_RK.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def silenced_transformers() -> Iterator[None]:
    """Context without transformers' remarks, such as those about a new head or missing kernels of a small copy."""
    from transformers.utils import logging

    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
