"""The model families that have native code, by the `model_type` of their config.

A family has what its config.json does not say: the library's defaults, and its differences in structure. To
add a family with a supported structure, add an entry.

Sources: the configuration_*.py and modeling_*.py of transformers 5.23. `tests/workers/test_families.py`
compares the defaults with them, and the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from workers.models.errors import ModelError, UnsupportedError
from workers.models.values import boolean, integer, names, non_negative_integer, number

FULL, SLIDING, MLP = "full_attention", "sliding_attention", "mlp"
RecurrentKind = Literal["short_conv", "mamba2", "gated_delta"]
# The types of layers in configs.
RECURRENT_TYPES: dict[RecurrentKind, str] = {
    "short_conv": "conv",
    "mamba2": "linear_attention",
    "gated_delta": "linear_attention",
}

LayerTypes = Callable[[Mapping[str, object], int], list[str]]
"""The type of each layer, from the settings and the number of layers, if `layer_types` is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """The names of a layer's norms in a checkpoint. None: there is no norm at that place."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of tensors in a layer of a checkpoint; {} stands for the number of the expert.

    Attributes:
        router: Before "weight", or "bias".
        gate: Likewise.
        up: Likewise.
        down: Likewise.
        stacked: What the names of tensors begin with that have the matrices of all experts; see
            `workers.models.stacked_experts`. None: each matrix is a tensor.
        stacked_parts: The rest of these names: of gate and up, and of down.
        by_turns: In these the rows of gate and up take turns, and inputs come before outputs.
        shared: What the names of the expert that computes each token begin with; None: there is none.
        shared_gate: Before "weight": its output is multiplied by the sigmoid of this product. "": it is not.
    """

    router: str
    gate: str
    up: str
    down: str
    stacked: str | None = None
    stacked_parts: tuple[str, str] = ("gate_up_proj", "down_proj")
    by_turns: bool = False
    shared: str | None = None
    shared_gate: str = ""


PRE_NORMS = NormNames(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
POST_NORMS = NormNames(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
SANDWICH_NORMS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def _all_sliding(_: Mapping[str, object], layers: int) -> list[str]:
    return [SLIDING] * layers


def _sliding_from_max_window_layers(settings: Mapping[str, object], layers: int) -> list[str]:
    # 0 means that every layer has the window, so null is refused.
    first = non_negative_integer(settings, "max_window_layers")
    return [SLIDING if index >= first else FULL for index in range(layers)]


def _full_every(default: int) -> LayerTypes:
    """Every n-th layer is full; n is `sliding_window_pattern` in old configs, else `default`."""

    def types(settings: Mapping[str, object], layers: int) -> list[str]:
        every = integer(settings, "sliding_window_pattern", default)
        return [FULL if (index + 1) % every == 0 else SLIDING for index in range(layers)]

    return types


def _every_other_below_max_window_layers(settings: Mapping[str, object], layers: int) -> list[str]:
    below = non_negative_integer(settings, "max_window_layers")
    return [SLIDING if index % 2 == 0 and index < below else FULL for index in range(layers)]


def _sliding_without_rope(settings: Mapping[str, object], layers: int) -> list[str]:
    # Only here does it count: layers that are listed have the window anyway.
    if not boolean(settings, "use_sliding_window", default=False):
        return [FULL] * layers
    return [FULL if rotated else SLIDING for rotated in rope_layers(settings, layers)]


def rope_layers(settings: Mapping[str, object], layers: int) -> list[bool]:
    """Which layers have a rotary embedding: all, or those with a 1 in `no_rope_layers`, despite its name.

    If that is absent, every `no_rope_layer_interval`-th layer has none. Raises ModelError.
    """
    interval = settings.get("no_rope_layer_interval")
    listed = settings.get("no_rope_layers")
    if listed is None:
        if interval is None:
            return [True] * layers
        every = integer(settings, "no_rope_layer_interval")
        return [(index + 1) % every != 0 for index in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(one not in (0, 1) for one in listed):
        raise ModelError(f"no_rope_layers: must be {layers} zeros and ones, got {listed!r}")
    return [bool(one) for one in listed[:layers]]


Respelled = Callable[[Mapping[str, object]], Mapping[str, object]]
"""Settings of a family, defaults included, in the spelling that all families have. Raises ModelError."""


def _lfm2_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `Lfm2Config` and `Lfm2MLP` of the library read them."""
    layers = integer(settings, "num_hidden_layers")
    width = integer(settings, "intermediate_size" if settings.get("block_ff_dim") is None else "block_ff_dim")
    if boolean(settings, "block_auto_adjust_ff_dim", default=True):
        width = int(2 * width / 3)
        if settings.get("block_ffn_dim_multiplier") is not None:
            of = integer(settings, "block_multiple_of")
            width = -(-int(number(settings, "block_ffn_dim_multiplier") * width) // of) * of
    found = dict(settings) | {"intermediate_size": width, "rms_norm_eps": settings["norm_eps"]}
    if settings.get("tie_embedding") is not None:
        found["tie_word_embeddings"] = settings["tie_embedding"]
    if settings.get("layer_types") is None:
        full = settings.get("full_attn_idxs")
        full = range(layers) if full is None else full
        if not isinstance(full, range | list):
            raise ModelError(f"full_attn_idxs: must be a list of layer numbers, got {full!r}")
        found["layer_types"] = [FULL if index in full else "conv" for index in range(layers)]
    return found


def _qwen2_moe_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `Qwen2MoeAttention` and `Qwen2MoeConfig` of the library read them."""
    return dict(settings) | {"attention_bias": boolean(settings, "qkv_bias", default=True)}


def _delta_rule_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `Qwen3NextConfig` and `Qwen3_5TextConfig` of the library read them."""
    if settings.get("layer_types") is not None:
        return settings
    every = integer(settings, "full_attention_interval", 4)
    layers = range(integer(settings, "num_hidden_layers"))
    types = [FULL if (index + 1) % every == 0 else RECURRENT_TYPES["gated_delta"] for index in layers]
    return {**settings, "layer_types": types}


def _without_dense_layers(settings: Mapping[str, object]) -> Mapping[str, object]:
    """Likewise as `Qwen3_5MoeTextConfig`, which has no width of an MLP."""
    return {**_delta_rule_settings(settings), "intermediate_size": settings["moe_intermediate_size"]}


def _granite_moe_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `GraniteMoeSharedConfig` of the library reads them."""
    return {**settings, "shared_expert_intermediate_size": settings.get("shared_intermediate_size", 0)}


def _latent_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `DeepseekV3Config`, `DeepseekV2Config` and `Glm4MoeLiteConfig` of the library read them."""
    layers, size = integer(settings, "num_hidden_layers"), integer(settings, "moe_intermediate_size")
    if (types := settings.get("mlp_layer_types")) is not None:
        if not isinstance(types, list) or len(types) != layers or {*types} - {"dense", "sparse"}:
            raise ModelError(f"mlp_layer_types: must be dense or sparse for {layers} layers, got {types!r}")
        dense = [index for index, kind in enumerate(types) if kind == "dense"]
    else:
        dense = [*range(min(layers, non_negative_integer(settings, "first_k_dense_replace")))]
    experts = next(
        (
            settings[name]
            for name in ("n_routed_experts", "num_local_experts", "num_experts")
            if settings.get(name)
        ),
        None,
    )
    return dict(settings) | {
        "num_experts": experts,
        "num_local_experts": None,
        "shared_expert_intermediate_size": size * integer(settings, "n_shared_experts"),
        "mlp_only_layers": dense,
        # What pages have of a token.
        "num_key_value_heads": 1,
        "head_dim": integer(settings, "kv_lora_rank") + integer(settings, "qk_rope_head_dim"),
    }


# Of layers in the configs of Granite 4; see `layer_types` in the library's configuration_utils.py.
_OLD_TYPES = {"mamba": "linear_attention", "attention": FULL}


def _granite_hybrid_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `GraniteMoeHybridConfig` of the library reads them."""
    layers = integer(settings, "num_hidden_layers")
    listed = settings.get("layer_types") or settings.get("layers_block_type")
    if listed is None:
        listed = ["linear_attention"] * layers
    if isinstance(listed, list):
        listed = [_OLD_TYPES.get(str(one), one) for one in listed]
    found = {**_granite_moe_settings(settings), "layer_types": listed}
    if not settings["num_local_experts"]:
        found["intermediate_size"] = settings["shared_intermediate_size"]
    if settings.get("position_embedding_type") != "rope":
        found["no_rope_layers"] = [0] * layers
    return found


def _bamba_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `BambaConfig` of the library reads them, which knows no other share of rotated elements."""
    full = settings.get("attn_layer_indices") or []
    if not isinstance(full, list):
        raise ModelError(f"attn_layer_indices: must be a list of layer numbers, got {full!r}")
    layers = range(integer(settings, "num_hidden_layers"))
    types = [FULL if index in full else RECURRENT_TYPES["mamba2"] for index in layers]
    return {**settings, "layer_types": types, "partial_rotary_factor": 0.5}


# Letters of `hybrid_override_pattern`.
_NEMOTRON_TYPES = {"M": "linear_attention", "*": FULL, "-": MLP, "E": "moe"}
# Old names of settings, which the library prefers, and names that other families have.
_NEMOTRON_NAMES = (
    ("mamba_n_groups", "n_groups", "mamba_n_groups"),
    ("mamba_d_conv", "conv_kernel", "mamba_d_conv"),
    ("mamba_conv_bias", "use_conv_bias", "mamba_conv_bias"),
    ("mamba_dt_min", "time_step_min", "time_step_min"),
    ("", "use_bias", "mamba_proj_bias"),
    ("", "mamba_num_heads", "mamba_n_heads"),
    ("", "mamba_head_dim", "mamba_d_head"),
    ("", "ssm_state_size", "mamba_d_state"),
    ("", "mamba_hidden_act", "hidden_act"),
    ("", "layer_norm_epsilon", "rms_norm_eps"),
)


def _nemotron_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    """As `NemotronHConfig` of the library reads them. No layer has the sliding window."""
    listed = settings.get("layers_block_type") or settings.get("layer_types")
    pattern = settings.get("hybrid_override_pattern")
    if listed is None:
        listed = [_NEMOTRON_TYPES.get(one, one) for one in pattern] if isinstance(pattern, str) else ["moe"]
    if not isinstance(listed, list):
        raise ModelError(f"layers_block_type: must be a list of types of layers, got {listed!r}")
    spelled = {name: settings.get(old, settings[new]) for old, new, name in _NEMOTRON_NAMES}
    inner = integer(spelled, "mamba_n_heads") * integer(spelled, "mamba_d_head")
    return {
        **settings,
        **spelled,
        "mamba_expand": 1,
        "mamba_d_ssm": inner,
        "layer_types": [_OLD_TYPES.get(str(one), one) for one in listed],
        "num_hidden_layers": len(listed),
        "no_rope_layers": [0] * len(listed),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The properties of a family that its configs do not say.

    Attributes:
        defaults: The library's values of absent settings, if they differ from those of `config`. A setting
            that is null is not absent.
        reads: The settings that this family reads in addition to those that all families read.
        qkv_bias: The q, k and v projections have a bias; None: as `attention_bias` says.
        output_bias: The output projection of attention has a bias; None: as `attention_bias` says.
        mlp_bias: The projections of the MLP have a bias; None: as `mlp_bias` says.
        qk_norm: Queries and keys are RMS-normalised before the rotation: each head, or the row of all heads.
        norms: The norms of a layer.
        wide_norms: The weight of a norm multiplies before the result is rounded to the model's dtype.
        norm_offset: Added to the weights of norms.
        layer_types: Which layers have the sliding window.
        windows_opt_in: `sliding_window` is used only if `use_sliding_window` is true.
        rope_by_type: Each type of layer has its own parameters of the rotary embedding.
        scales_embeddings: Embeddings are multiplied by the square root of their width.
        activation: The name of the setting for the activation of the MLP.
        respelled: The settings of a config in the spelling that all families have.
        recurrent: The kind of recurrent layers that may be in place of attention; None: there are none.
        recurrent_place: What the names of their parts begin with in a layer of a checkpoint.
        recurrent_names: Of the gated delta rule, the projections in a checkpoint: of gates, of the inputs of
            the convolution, of b and of a. Or the last two, or each two, are one: of each key head together.
        final_norm: The name of the norm before the head in a checkpoint.
        qk_norm_names: The norms of queries and of keys.
        attention: What the names of the parts of attention begin with in a layer of a checkpoint.
        attention_names: The projections in a checkpoint: q, k and v, or one that is fused.
        attention_output: The projection back to the hidden width.
        mlp: What the names of an MLP begin with in a layer of a checkpoint.
        mlp_down: Its projection back to the hidden width.
        mlp_names: The projections of the MLP in a checkpoint: gate and up, one that is fused, or up alone.
        gguf_mlp_names: Those that a GGUF file has in their place; empty: the same ones.
        gguf_recurrent_names: The same for `recurrent_names`.
        gguf_tiled: A GGUF file has the value heads of the gated delta rule in another order; see
            `GatedDeltaConfig`.
        gated_mlp: The MLP has a gate.
        one_sublayer: Each layer is attention, what is in its place, or an MLP.
        renamed: What the names of tensors begin with, and what instead in checkpoints of other families. The
            first match counts.
        experts: The names of the experts' tensors; None: no layer has experts.
        wide_routing: The router's weights of experts stay float32.
        expert_biases: The router and the projections of experts have biases.
        clamped_gate: The gate of experts is `clamped_swiglu`, which its config cannot change.
        sinks: Each head has a logit that is a term of the softmax and has no value.
        sigmoid_routing: Experts are chosen by sigmoids, with a correction; see `kernels.experts`.
        wide_router: The router and its product are float32.
        left_out: What the names of tensors begin with that a forward does not need; {} stands for the number
            of layers.
        gated_attention: What is attended is multiplied by sigmoid(gate), and the projection of queries has
            the gates too, those of a head after its query.
    """

    defaults: Mapping[str, object] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: Literal["none", "head", "row"] = "none"
    norms: NormNames = PRE_NORMS
    wide_norms: bool = False
    norm_offset: float = 0.0
    layer_types: LayerTypes = _all_sliding
    windows_opt_in: bool = False
    rope_by_type: bool = False
    scales_embeddings: bool = False
    activation: str = "hidden_act"
    respelled: Respelled = dict
    recurrent: RecurrentKind | None = None
    recurrent_place: str = "mamba"
    recurrent_names: tuple[str, ...] = ()
    final_norm: str = "norm"
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    attention: str = "self_attn"
    attention_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    attention_output: str = "o_proj"
    mlp: str = "mlp"
    mlp_down: str = "down_proj"
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj")
    gguf_mlp_names: tuple[str, ...] = ()
    gguf_recurrent_names: tuple[str, ...] = ()
    gguf_tiled: bool = False
    gated_mlp: bool = True
    one_sublayer: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    experts: ExpertNames | None = None
    wide_routing: bool = False
    expert_biases: bool = False
    clamped_gate: bool = False
    sinks: bool = False
    sigmoid_routing: bool = False
    wide_router: bool = False
    left_out: tuple[str, ...] = ()
    gated_attention: bool = False

    def renamed_tensor(self, name: str) -> str:
        """The name of a tensor as it would be in checkpoints of other families."""
        for before, after in self.renamed:
            if name.startswith(before):
                return after + name.removeprefix(before)
        return name


def _defaults(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    max_position_embeddings: int,
    bos_token_id: int | None,
    eos_token_id: int | None,
    **more: object,
) -> dict[str, object]:
    """The defaults of a family."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "max_position_embeddings": max_position_embeddings,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        **more,
    }


_WINDOW = names("sliding_window")
_QWEN_WINDOWS = names("sliding_window use_sliding_window max_window_layers layer_types")
_LLAMA_DEFAULTS = _defaults(32000, 4096, 11008, 32, 32, 2048, 1, 2)
_MISTRAL_DEFAULTS = _defaults(32000, 4096, 14336, 32, 32, 131072, 1, 2, num_key_value_heads=8)
_QWEN_DEFAULTS = _defaults(
    *(151936, 4096, 22016, 32, 32, 32768, None, None),
    num_key_value_heads=32,
    sliding_window=4096,
    max_window_layers=28,
)
_GEMMA_DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_OLMO_DEFAULTS = _defaults(50304, 4096, 11008, 32, 32, 2048, None, 50279, rms_norm_eps=1e-5)
_GRANITE_READS = names("embedding_multiplier logits_scaling residual_multiplier attention_multiplier")
_GEMMA_READS = names("sliding_window layer_types query_pre_attn_scalar final_logit_softcapping")
_QWEN_EXPERTS = ExpertNames(
    "mlp.gate",
    "mlp.experts.{}.gate_proj",
    "mlp.experts.{}.up_proj",
    "mlp.experts.{}.down_proj",
    stacked="mlp.experts.",
)
_QWEN_SHARED_EXPERTS = replace(
    _QWEN_EXPERTS, shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"
)
_QWEN_EXPERTS_READS = names(
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size decoder_sparse_step"
    " norm_topk_prob mlp_only_layers"
)
_MIXTRAL_EXPERTS = ExpertNames(
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}.w1",
    "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)

_GRANITE_EXPERTS = ExpertNames(
    "block_sparse_moe.router.layer",
    "block_sparse_moe.experts.{}.gate_proj",
    "block_sparse_moe.experts.{}.up_proj",
    "block_sparse_moe.experts.{}.down_proj",
    stacked="block_sparse_moe.",
    stacked_parts=("input_linear.weight", "output_linear.weight"),
    shared="shared_mlp",
)

_GPT_OSS_EXPERTS = ExpertNames(
    "mlp.router",
    "mlp.experts.{}.gate_proj",
    "mlp.experts.{}.up_proj",
    "mlp.experts.{}.down_proj",
    stacked="mlp.experts.",
    by_turns=True,
)

_MAMBA2_READS = names(
    "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_conv_bias"
    " mamba_proj_bias time_step_limit"
)
_MAMBA2_DEFAULTS: dict[str, object] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "hidden_act": "silu",
}
_DELTA_RULE_READS = names(
    "layer_types full_attention_interval partial_rotary_factor linear_conv_kernel_dim linear_key_head_dim"
    " linear_value_head_dim linear_num_key_heads linear_num_value_heads gguf_layout"
)
_DELTA_RULE_DEFAULTS: dict[str, object] = {
    "head_dim": 256,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

_DEEPSEEK_EXPERTS = replace(_QWEN_EXPERTS, shared="mlp.shared_experts")
_LATENT_READS = names(
    "attention_bias q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts"
    " num_experts num_local_experts num_experts_per_tok n_shared_experts moe_intermediate_size"
    " first_k_dense_replace norm_topk_prob routed_scaling_factor n_group topk_group"
)
_DEEPSEEK_V3 = Family(
    defaults=_defaults(
        *(129280, 7168, 18432, 61, 128, 4096, 0, 1),
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
    ),
    reads=_LATENT_READS | {"rope_interleave"},
    respelled=_latent_settings,
    experts=_DEEPSEEK_EXPERTS,
    wide_routing=True,
    wide_router=True,
    sigmoid_routing=True,
    left_out=("model.layers.{}.",),  # for the prediction of several tokens
)

_MISTRAL = Family(
    defaults=_MISTRAL_DEFAULTS | {"sliding_window": 4096},
    reads=_WINDOW | {"layer_types"},
    qkv_bias=False,
    output_bias=False,
)

_QWEN_3_5 = Family(
    defaults=_defaults(
        *(248320, 4096, 12288, 32, 16, 32768, None, None),
        num_key_value_heads=4,
    )
    | _DELTA_RULE_DEFAULTS,
    reads=_DELTA_RULE_READS,
    qk_norm="head",
    wide_norms=True,
    norm_offset=1.0,
    respelled=_delta_rule_settings,
    recurrent="gated_delta",
    recurrent_place="linear_attn",
    recurrent_names=("in_proj_z", "in_proj_qkv", "in_proj_b", "in_proj_a"),
    gguf_tiled=True,
    left_out=("mtp.",),  # for the prediction of several tokens
    gated_attention=True,
)

_GRANITE_MOE = Family(
    defaults=_LLAMA_DEFAULTS
    | {"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu"},
    reads=_GRANITE_READS | names("num_local_experts num_experts_per_tok"),
    respelled=_granite_moe_settings,
    mlp="shared_mlp",
    mlp_names=("input_linear",),
    mlp_down="output_linear",
    experts=_GRANITE_EXPERTS,
)
_GRANITE_MOE_SHARED = replace(
    _GRANITE_MOE,
    defaults={**_GRANITE_MOE.defaults, "shared_intermediate_size": 0},
    reads=_GRANITE_MOE.reads | {"shared_intermediate_size"},
)

FAMILIES: dict[str, Family] = {
    "llama": Family(defaults=_LLAMA_DEFAULTS, mlp_bias=None),
    "mistral": _MISTRAL,
    # What the library makes of a mistral whose config lists the types of its layers.
    "ministral": _MISTRAL,
    "mixtral": Family(
        defaults=_MISTRAL_DEFAULTS
        | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2, "num_local_experts": 8},
        reads=_WINDOW | {"num_experts_per_tok", "num_local_experts"},
        qkv_bias=False,
        output_bias=False,
        experts=_MIXTRAL_EXPERTS,
        wide_routing=True,
    ),
    "qwen2": Family(
        defaults=_QWEN_DEFAULTS,
        reads=_QWEN_WINDOWS,
        qkv_bias=True,
        output_bias=False,
        layer_types=_sliding_from_max_window_layers,
        windows_opt_in=True,
    ),
    "qwen3": Family(
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
        reads=_QWEN_WINDOWS,
        qk_norm="head",
        layer_types=_sliding_from_max_window_layers,
        windows_opt_in=True,
    ),
    "qwen3_moe": Family(
        defaults=_defaults(
            *(151936, 2048, 6144, 24, 32, 32768, None, None),
            num_key_value_heads=4,
            sliding_window=4096,
            num_experts_per_tok=8,
            num_experts=128,
            moe_intermediate_size=768,
        ),
        reads=_QWEN_EXPERTS_READS | names("sliding_window use_sliding_window"),
        qk_norm="head",
        windows_opt_in=True,
        experts=_QWEN_EXPERTS,
    ),
    "gemma": Family(
        defaults=_defaults(
            *(256000, 3072, 24576, 28, 16, 8192, 2, 1),
            num_key_value_heads=16,
            head_dim=256,
            tie_word_embeddings=True,
            hidden_act="gelu_pytorch_tanh",
        ),
        wide_norms=True,
        norm_offset=1.0,
        scales_embeddings=True,
    ),
    "gemma2": Family(
        defaults=_defaults(256000, 2304, 9216, 26, 8, 8192, 2, 1, **_GEMMA_DEFAULTS)
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        reads=_GEMMA_READS | {"attn_logit_softcapping"},
        norms=SANDWICH_NORMS,
        wide_norms=True,
        norm_offset=1.0,
        layer_types=_full_every(2),
        scales_embeddings=True,
        activation="hidden_activation",
    ),
    "gemma3_text": Family(
        defaults=_defaults(262208, 2304, 9216, 26, 8, 131072, 2, 1, **_GEMMA_DEFAULTS)
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        reads=_GEMMA_READS | {"sliding_window_pattern", "rope_local_base_freq"},
        qk_norm="head",
        norms=SANDWICH_NORMS,
        wide_norms=True,
        norm_offset=1.0,
        layer_types=_full_every(6),
        rope_by_type=True,
        scales_embeddings=True,
        activation="hidden_activation",
    ),
    "phi3": Family(
        defaults=_defaults(32064, 3072, 8192, 32, 32, 4096, 1, 32000)
        | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        reads=_WINDOW | {"partial_rotary_factor"},
        qkv_bias=False,
        output_bias=False,
        attention_names=("qkv_proj",),
        mlp_names=("gate_up_proj",),
    ),
    "smollm3": Family(
        defaults=_defaults(
            *(128256, 2048, 11008, 36, 16, 32768, 128000, 128001),
            num_key_value_heads=4,
            rope_theta=2e6,
            tie_word_embeddings=True,
            no_rope_layer_interval=4,
        ),
        reads=names("sliding_window use_sliding_window layer_types no_rope_layers no_rope_layer_interval"),
        mlp_bias=None,
        layer_types=_sliding_without_rope,
    ),
    "olmo2": Family(
        defaults=_OLMO_DEFAULTS,
        qk_norm="row",
        norms=POST_NORMS,
        wide_norms=True,
    ),
    "olmo3": Family(
        # In the old spelling the library uses `rope_theta` for the full layers only.
        defaults=_OLMO_DEFAULTS | {"sliding_window": 4096, "rope_theta": 5e5, "rope_local_base_freq": 5e5},
        reads=names("sliding_window layer_types"),
        qk_norm="row",
        norms=POST_NORMS,
        wide_norms=True,
        layer_types=_full_every(4),
        rope_by_type=True,
    ),
    "gpt_oss": Family(
        defaults=_defaults(
            *(201088, 2880, 2880, 36, 64, 131072, None, None),
            num_key_value_heads=8,
            head_dim=64,
            rms_norm_eps=1e-5,
            sliding_window=128,
            attention_bias=True,
            num_local_experts=128,
            num_experts_per_tok=4,
            rope_theta=150_000.0,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        ),
        reads=_WINDOW
        | names("layer_types num_local_experts num_experts num_experts_per_tok swiglu_alpha swiglu_limit"),
        wide_norms=True,
        layer_types=_full_every(2),
        experts=_GPT_OSS_EXPERTS,
        expert_biases=True,
        clamped_gate=True,
        sinks=True,
    ),
    "lfm2": Family(
        defaults=_defaults(
            *(65536, 2560, 12288, 32, 32, 128_000, 1, 2),
            num_key_value_heads=8,
            norm_eps=1e-5,
            rope_theta=1e6,
            tie_word_embeddings=True,
            conv_bias=False,
            conv_L_cache=3,
            block_multiple_of=256,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=True,
        ),
        reads=names(
            "layer_types full_attn_idxs norm_eps tie_embedding conv_bias conv_L_cache block_ff_dim"
            " block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim"
        ),
        qkv_bias=False,
        output_bias=False,
        qk_norm="head",
        norms=NormNames(before_attention="operator_norm", before_mlp="ffn_norm"),
        respelled=_lfm2_settings,
        recurrent="short_conv",
        recurrent_place="conv",
        final_norm="embedding_norm",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        attention_output="out_proj",
        mlp="feed_forward",
        mlp_names=("w1", "w3"),
        mlp_down="w2",
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE_SHARED,
    "granitemoehybrid": replace(
        _GRANITE_MOE_SHARED,
        defaults={**_GRANITE_MOE.defaults, **_MAMBA2_DEFAULTS, "shared_intermediate_size": 1024},
        reads=_GRANITE_MOE_SHARED.reads
        | _MAMBA2_READS
        | names("layer_types layers_block_type position_embedding_type gguf_layout"),
        respelled=_granite_hybrid_settings,
        recurrent="mamba2",
        gguf_mlp_names=("gate_linear", "up_linear"),
    ),
    "bamba": Family(
        defaults=_defaults(
            *(128000, 4096, 14336, 32, 32, 262144, 1, 2), num_key_value_heads=8, rms_norm_eps=1e-5
        )
        | _MAMBA2_DEFAULTS,
        reads=_MAMBA2_READS | names("attn_layer_indices layer_types partial_rotary_factor"),
        mlp_bias=None,
        norms=NormNames(before_attention="input_layernorm", before_mlp="pre_ff_layernorm"),
        respelled=_bamba_settings,
        recurrent="mamba2",
        final_norm="final_layernorm",
        mlp="feed_forward",
    ),
    "nemotron_h": Family(
        defaults=_defaults(
            *(131072, 4096, 21504, 1, 32, 4096, 1, 2),
            num_key_value_heads=8,
            head_dim=128,
            mlp_hidden_act="relu2",
            layer_norm_epsilon=1e-5,
            mamba_num_heads=128,
            mamba_head_dim=64,
            mamba_hidden_act="silu",
            ssm_state_size=128,
            n_groups=8,
            conv_kernel=4,
            use_conv_bias=True,
            use_bias=False,
            time_step_min=0.001,
        ),
        reads=names(
            "layer_types layers_block_type hybrid_override_pattern layer_norm_epsilon mamba_num_heads"
            " mamba_head_dim mamba_hidden_act ssm_state_size n_groups conv_kernel use_conv_bias use_bias"
            " time_step_min mamba_n_groups mamba_d_conv mamba_conv_bias mamba_dt_min sliding_window"
        ),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=None,
        norms=NormNames(before_attention="norm", before_mlp="norm"),
        wide_norms=True,
        activation="mlp_hidden_act",
        respelled=_nemotron_settings,
        recurrent="mamba2",
        recurrent_place="mixer",
        final_norm="norm_f",
        attention="mixer",
        mlp="mixer",
        mlp_names=("up_proj",),
        gated_mlp=False,
        one_sublayer=True,
        renamed=(
            ("backbone.embeddings.", "model.embed_tokens."),
            ("model.embeddings.", "model.embed_tokens."),
            ("backbone.", "model."),
        ),
        left_out=("mtp.",),  # for the prediction of several tokens
    ),
    "arcee": Family(
        defaults=_defaults(*(32000, 2560, 18432, 32, 32, 4096, 128000, 128001), rms_norm_eps=1e-5)
        | {"hidden_act": "relu2"},
        mlp_bias=None,
        mlp_names=("up_proj",),
        gated_mlp=False,
    ),
    "qwen3_5_text": _QWEN_3_5,
    "qwen3_5_moe_text": replace(
        _QWEN_3_5,
        defaults=_defaults(
            *(248320, 2048, 5632, 40, 16, 32768, None, None),
            num_key_value_heads=2,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            norm_topk_prob=True,
        )
        | _DELTA_RULE_DEFAULTS,
        respelled=_without_dense_layers,
        reads=_DELTA_RULE_READS
        | names(
            "num_experts num_local_experts num_experts_per_tok moe_intermediate_size"
            " shared_expert_intermediate_size"
        ),
        experts=_QWEN_SHARED_EXPERTS,
    ),
    "qwen3_next": replace(
        _QWEN_3_5,
        defaults=_defaults(
            *(151936, 2048, 5632, 48, 16, 32768, None, None),
            num_key_value_heads=2,
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            norm_topk_prob=True,
        )
        | _DELTA_RULE_DEFAULTS,
        reads=_DELTA_RULE_READS | _QWEN_EXPERTS_READS | {"shared_expert_intermediate_size"},
        recurrent_names=("in_proj_qkvz", "in_proj_ba"),
        gguf_recurrent_names=("in_proj_z", "in_proj_qkv", "in_proj_ba"),
        gguf_tiled=False,
        experts=_QWEN_SHARED_EXPERTS,
    ),
    "qwen2_moe": Family(
        defaults=_defaults(
            *(151936, 2048, 5632, 24, 16, 32768, None, None),
            num_key_value_heads=16,
            sliding_window=4096,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            max_window_layers=28,
            shared_expert_intermediate_size=5632,
            qkv_bias=True,
        ),
        reads=_QWEN_EXPERTS_READS | _QWEN_WINDOWS | names("qkv_bias shared_expert_intermediate_size"),
        layer_types=_every_other_below_max_window_layers,
        respelled=_qwen2_moe_settings,
        output_bias=False,
        windows_opt_in=True,
        experts=_QWEN_SHARED_EXPERTS,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3,
        defaults=_defaults(
            *(154880, 2048, 10240, 47, 20, 202752, 0, 1),
            rms_norm_eps=1e-5,
            kv_lora_rank=512,
            q_lora_rank=768,
            qk_rope_head_dim=64,
            qk_nope_head_dim=192,
            v_head_dim=256,
            n_routed_experts=64,
            num_experts_per_tok=4,
            n_shared_experts=1,
            moe_intermediate_size=1536,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=1.8,
            n_group=1,
            topk_group=1,
        ),
        reads=_LATENT_READS - {"first_k_dense_replace"} | {"rope_interleave", "mlp_layer_types"},
    ),
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        defaults=_defaults(
            *(102400, 4096, 11008, 32, 32, 2048, 1, 2),
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_routed_experts=64,
            n_shared_experts=2,
            moe_intermediate_size=1407,
            first_k_dense_replace=0,
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
        ),
        reads=_LATENT_READS | {"topk_method", "mlp_bias"},
        mlp_bias=None,
        sigmoid_routing=False,
        left_out=(),
    ),
    "granite": Family(
        reads=_GRANITE_READS,
        defaults=_LLAMA_DEFAULTS | {"attention_multiplier": 1.0},
        mlp_bias=None,
    ),
}


def family_of(model_type: object) -> Family:
    """The family of a config.

    Raises:
        UnsupportedError: The family is unknown.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedError(f"model_type: there is no native code for {model_type!r}")
    return FAMILIES[model_type]
