"""Reads the settings of a config.json that differ between layers: sliding windows and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernels.routing_rule import BEST_SOFTMAX, RoutingRule
from workers.models.errors import ModelError, UnsupportedError
from workers.models.family import CONV, EXPERTS, FULL, LINEAR, MLP, SLIDING, Family
from workers.models.values import boolean, integer, non_negative_integer, number


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a sparse layer.

    Attributes:
        count: The number of experts.
        per_token: The number of experts that the router chooses for a token.
        intermediate_size: The intermediate width of each.
        normalized: The weights of the chosen experts add up to one for each token.
        shared_size: The intermediate width of the shared expert; 0: there is none.
        latent: The width of their inputs and outputs; 0: the hidden width.
        routing: The rule by which the router chooses.
        corrected: Whether the scores for the choice have a correction; see `kernels.experts.route`.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    shared_size: int = 0
    latent: int = 0
    routing: RoutingRule = BEST_SOFTMAX
    corrected: bool = False


def read_layer_types(
    settings: Mapping[str, object], family: Family, layers: int, *, windowed: bool
) -> list[str]:
    """The type of each layer. Raises ModelError, or UnsupportedError for an unknown type."""
    listed = settings.get("layer_types") if "layer_types" in family.reads else None
    if listed is None:
        # Without a window the type matters only if each type has its own rotary embedding.
        return family.layer_types(settings, layers) if windowed or family.rope_by_type else [FULL] * layers
    recurrent = CONV if family.recurrent == "short_conv" else LINEAR
    known = [FULL, SLIDING if family.recurrent is None else recurrent]
    known += [MLP, EXPERTS] if family.one_sublayer else []
    if not isinstance(listed, list) or any(layer_type not in known for layer_type in listed):
        raise UnsupportedError(f"layer_types: each must be one of {', '.join(known)}, got {listed!r}")
    if len(listed) != layers:
        raise ModelError(f"layer_types: must have {layers} entries, got {len(listed)}")
    if SLIDING in listed and not (windowed or family.rope_by_type):
        raise ModelError(f"layer_types: {SLIDING} needs a sliding_window that is used")
    return listed


def sparse_layers(settings: Mapping[str, object], family: Family, layers: int) -> list[bool]:
    """Which layers have experts. Raises ModelError."""
    if family.experts is None or settings.get("num_local_experts") == 0:
        return [False] * layers
    every = integer(settings, "decoder_sparse_step", 1)
    dense = settings.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise ModelError(f"mlp_only_layers: must be a list of layer numbers, got {dense!r}")
    return [index not in dense and (index + 1) % every == 0 for index in range(layers)]


def read_experts(settings: Mapping[str, object], family: Family) -> ExpertsConfig:
    """The experts, in the spelling of Qwen or of Mixtral. Raises ModelError."""
    is_qwen = "moe_intermediate_size" in settings
    has_shared = family.experts is not None and family.experts.shared is not None
    # transformers 5 also writes Qwen's number of experts under Mixtral's name.
    name = "num_experts" if settings.get("num_local_experts") is None else "num_local_experts"
    count = integer(settings, name)
    per_token = integer(settings, "num_experts_per_tok")
    if per_token > count:
        raise ModelError(f"num_experts_per_tok: must be at most {name}, which is {count}, got {per_token}")
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        intermediate_size=integer(settings, "moe_intermediate_size" if is_qwen else "intermediate_size"),
        normalized=boolean(settings, "norm_topk_prob", default=not is_qwen),
        shared_size=non_negative_integer(settings, "shared_expert_intermediate_size") if has_shared else 0,
        latent=non_negative_integer(settings, "moe_latent_size") if settings.get("moe_latent_size") else 0,
        routing=_routing(settings, count, family),
        corrected=family.sigmoid_routing and boolean(settings, "use_expert_bias", default=True),
    )


def _routing(settings: Mapping[str, object], count: int, family: Family) -> RoutingRule:
    """Reads the rule of routing, with DeepSeek's groups. Raises ModelError, or UnsupportedError."""
    if "routed_scaling_factor" not in family.reads:
        return BEST_SOFTMAX
    sigmoid, groups, best = family.sigmoid_routing, 1, 1
    method = settings.get("topk_method", "noaux_tc" if sigmoid else "greedy")
    known = ("noaux_tc",) if sigmoid else ("greedy", "group_limited_greedy")
    if method not in known:
        raise UnsupportedError(f"topk_method: must be one of {', '.join(known)}, got {method!r}")
    if not sigmoid and boolean(settings, "norm_topk_prob", default=False):
        raise UnsupportedError("norm_topk_prob: must be false, which the library takes it for")
    if method != "greedy":
        groups, best = integer(settings, "n_group", 1), integer(settings, "topk_group", 1)
    if count % groups or best > groups or (groups > 1 and count // groups < 2):
        raise ModelError(f"n_group, topk_group: {groups} and {best} do not fit {count} experts")
    scale = number(settings, "routed_scaling_factor")
    return RoutingRule(sigmoid, groups, best, scale, family.routing_eps)
