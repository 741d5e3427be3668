"""Router replay: a mixture of experts computes a pass with given routes in place of its own.

Where two experts of a token have nearly equal scores, rounding decides between them, and a server and a trainer that
decide differently disagree about the token's log-prob by far more than rounding. With replayed routes both compute the
same experts (R3, arXiv:2510.11370).

Only indices are replayed. Inside the forward of transformers' router, `topk` returns the given experts with the scores
that the router has for them now, and the router's own code normalizes these, so gradients still reach its weights.

Shapes: T tokens of a batch; P rows that a rank computes (tokens, with padding, of its slice); L transformer layers; E
experts; k experts of a token.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import BatchError, EngineConfigError
from ..upstream import FENCE
from .parts import find_backbone

if TYPE_CHECKING:
    from collections.abc import Callable

ROUTES = "routes"
"""Name of the routes among a batch's values per token."""

_FAMILIES = {
    "cohere2_moe": "Cohere2MoeTopKRouter",
    "deepseek_v3": "DeepseekV3TopkRouter",
    "exaone_moe": "ExaoneMoeTopkRouter",
    "flex_olmo": "FlexOlmoTopKRouter",
    "glm4_moe": "Glm4MoeTopkRouter",
    "glm4_moe_lite": "Glm4MoeLiteTopkRouter",
    "gpt_oss": "GptOssTopKRouter",
    "granitemoe": "GraniteMoeTopKRouter",
    "granitemoehybrid": "GraniteMoeHybridTopKRouter",
    "kimi_linear": "KimiLinearTopkRouter",
    "laguna": "LagunaTopKRouter",
    "mellum": "MellumTopKRouter",
    "minimax": "MiniMaxTopKRouter",
    "mixtral": "MixtralTopKRouter",
    "nemotron_h": "NemotronHTopkRouter",
    "olmoe": "OlmoeTopKRouter",
    "qwen2_moe": "Qwen2MoeTopKRouter",
    "qwen3_5_moe": "Qwen3_5MoeTopKRouter",
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "qwen3_next": "Qwen3NextTopKRouter",
    "solar_open": "SolarOpenTopkRouter",
}
ROUTERS = {
    name: FENCE.patch(
        name=f"replayed routes of {name}",
        reason="transformers' routers take no experts from outside",
        otherwise="refused",
        replaces={f"transformers.models.{family}.modeling_{family}:{name}": ("forward(hidden_states)",)},
        reads={f"transformers.models.{family}.modeling_{family}:{name}": ("top_k", "num_experts")},
    )
    for family, name in _FAMILIES.items()
}
_ROUTER_CLASS = re.compile(r"(Router|Gating)$")
_LAYER = re.compile(r"\.(\d+)\.")
_TOP_K = (torch.topk, torch.Tensor.topk)


class RouterReplay:
    """The routes of a model's passes: given, recorded, or the routers' own.

    They stay until the next pass begins, because recomputed layers run their routers again in the backward pass.
    """

    def __init__(self, routers: dict[int, Any], num_layers: int) -> None:
        """`routers`: by number of the transformer layer."""
        self.routers, self.num_layers = routers, num_layers
        self._given_PLk: Tensor | None = None
        self._recorded: dict[int, Tensor] | None = None
        self._num_different = self._num_compared = torch.zeros(())

    @property
    def shape(self) -> tuple[int, int]:
        """(L, k)"""
        return self.num_layers, max(int(router.top_k) for router in self.routers.values())

    def begin(self, given_PLk: Tensor | None = None, *, record: bool = False) -> None:
        """The next pass uses these routes, where they are not -1, or the routers' own, which it records."""
        self._given_PLk, self._recorded = given_PLk, {} if record else None

    def take_recorded(self) -> Tensor:
        """The routes of the last pass: int16 [P, L, k], -1 in layers without experts.

        Raises:
            EngineConfigError: no router has recorded any.
        """
        if not self._recorded:
            raise replay_refusal("the routers choose no experts by topk")
        recorded, self._recorded = self._recorded, None
        first_Pk = next(iter(recorded.values()))
        routes_PLk = first_Pk.new_full((len(first_Pk), *self.shape), -1)
        for layer, experts_Pk in recorded.items():
            routes_PLk[:, layer, : experts_Pk.shape[1]] = experts_Pk
        return routes_PLk

    def take_counts(self) -> tuple[Tensor, Tensor]:
        """(token-layer pairs whose own routes were other experts than the given ones, compared pairs) so far."""
        counts = self._num_different, self._num_compared
        self._num_different = self._num_compared = torch.zeros(())
        return counts

    def choose(self, layer: int, scores_PE: Tensor, own: Any) -> Any:
        """The result of a router's `topk` that is `own` without replay."""
        own_Pk = own[1]
        if self._recorded is not None:
            self._recorded[layer] = own_Pk.short()
        if self._given_PLk is None:
            return own
        given_Pk = self._given_PLk[:, layer, : own_Pk.shape[1]].long()
        if given_Pk.shape != own_Pk.shape:
            raise BatchError(field=ROUTES, value=tuple(given_Pk.shape), allowed=f"{tuple(own_Pk.shape)} in each layer")
        chosen_Pk = given_Pk.where(given_Pk >= 0, own_Pk)
        with torch.no_grad():
            differs_P = (chosen_Pk.sort(-1)[0] != own_Pk.sort(-1)[0]).any(-1)
            self._num_different = self._num_different + differs_P.sum()
            self._num_compared = self._num_compared + (given_Pk[:, 0] >= 0).sum()
        return torch.return_types.topk((scores_PE.gather(-1, chosen_Pk), chosen_Pk))


class _TopK(TorchFunctionMode):
    """Context in which a router's choice of experts goes through `RouterReplay.choose`."""

    def __init__(self, replay: RouterReplay, layer: int) -> None:
        super().__init__()
        self._replay, self._layer, self._router = replay, layer, replay.routers[layer]

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in _TOP_K:
            return result
        # DeepSeek's routers choose groups of experts before, from tensors of other shapes.
        is_choice = args[0].shape[1:] == (self._router.num_experts,) and result[1].shape[-1] == self._router.top_k
        return self._replay.choose(self._layer, args[0], result) if is_choice else result


def install_replay(model: Any) -> RouterReplay:
    """Let the routers of `model` replay routes, in place; until `begin` is called with some they choose themselves.

    Raises:
        EngineConfigError: the model has no routers, or some that cannot replay.
    """
    _, backbone = find_backbone(model)
    routers: dict[int, Any] = {}
    unknown = dict[str, None]()
    for name, module in backbone.named_modules() if backbone is not None else ():
        kind, number = type(module).__name__, _LAYER.search(f".{name}.")
        if not _ROUTER_CLASS.search(kind):
            continue
        if kind not in ROUTERS or number is None or int(number[1]) in routers:
            unknown[kind] = None
        else:
            routers[int(number[1])] = module
    if unknown or not routers:
        routes = f"the routers {', '.join(unknown)} cannot" if unknown else "it has no routers that could"
        raise replay_refusal(f"{type(model).__name__}: {routes} replay routes")
    replay = RouterReplay(routers, int(model.config.get_text_config().num_hidden_layers))
    for layer, router in routers.items():
        patch = ROUTERS[type(router).__name__]
        patch.check()
        patch.replace(router, forward=partial(_replayed, router.forward, replay, layer))
    return replay


def replay_refusal(problem: str) -> EngineConfigError:
    """The error of a model that cannot replay routes."""
    return EngineConfigError(problem, field="router_replay", allowed="off")


def _replayed(forward: Callable[..., Any], replay: RouterReplay, layer: int, *args: Any, **kwargs: Any) -> Any:
    with _TopK(replay, layer):
        return forward(*args, **kwargs)


def given_routes(routes_TLk: Tensor, last_T: Tensor, rows_T: Tensor, num_rows: int) -> Tensor:
    """Routes of the rows that a rank computes: int16 [P, L, k].

    Tokens that share a row, because their sequences share a prefix, have the routes of the first one. Rows of padding
    have -1, and so has the last token of a sequence, which servers do not compute, and on which nothing depends.

    Args:
        routes_TLk: any integer dtype.
        last_T: places of the last tokens of the sequences.
        rows_T: row of each token; a token of another rank has none of 0 to `num_rows` - 1.
    """
    is_used_T = (rows_T >= 0) & (rows_T < num_rows)
    is_used_T[last_T] = False
    used = is_used_T.nonzero()[:, 0]
    source_P = used.new_full((num_rows,), len(rows_T)).scatter_reduce(0, rows_T[used], used, "amin")
    given_PLk = torch.full((num_rows, *routes_TLk.shape[1:]), -1, dtype=torch.int16)
    is_given_P = source_P < len(rows_T)
    given_PLk[is_given_P] = routes_TLk[source_P[is_given_P]].short()
    return given_PLk


def routes_of_tokens(recorded_PLk: Tensor, rows_T: Tensor) -> Tensor:
    """The recorded routes of each token, [T, L, k]; -1 for tokens of other ranks."""
    is_own_T = (rows_T >= 0) & (rows_T < len(recorded_PLk))
    routes_TLk = recorded_PLk.new_full((len(rows_T), *recorded_PLk.shape[1:]), -1)
    routes_TLk[is_own_T] = recorded_PLk[rows_T[is_own_T]]
    return routes_TLk
