"""The architectures of GGUF files, and the keys that their files may have.

A key that is not listed refuses the file, since it may change the model. Sources: as for
`workers.common.gguf.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from workers.common.gguf import GgufError
from workers.common.gguf.header import Value, shown

# Settings of a config.json, and the keys that have them. Without one of the first the model is not known.
NEEDED = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
}
RMS_EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
WIDTH, WIDTH_OF_EXPERTS = "feed_forward_length", "expert_feed_forward_length"
KV_HEADS = "attention.head_count_kv"
# Which layers are recurrent; and how many layers behind the others predict several tokens, and are not read.
INTERVAL, RECURRENT_LAYERS, MORE_LAYERS = (
    "full_attention_interval", "attention.recurrent_layers", "nextn_predict_layers",
)  # fmt: skip
SSM = frozenset(
    {"ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count"}
)
_COMMON = {
    *NEEDED.values(),
    RMS_EPS, LAYER_EPS, WIDTH, KV_HEADS, "attention.key_length", "attention.value_length", "vocab_size",
    "rope.freq_base", "rope.dimension_count", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}  # fmt: skip
# They say where a file is from.
_WITHOUT_EFFECT = {"rope.scaling.finetuned", "tensor_data_layout", "attention.causal"}
_EXPERTS = frozenset({"expert_count", "expert_used_count"})
SHARED_EXPERT = "expert_shared_feed_forward_length"
# Values without an effect: softmax, and no shared experts but those whose width is named.
_ONLY: Mapping[str, Value] = {"expert_gating_func": 1, "expert_shared_count": 0}
_SIGMOID: Mapping[str, Value] = {"expert_gating_func": 2}
# Of latent attention, which has these with other values too.
_LATENT = frozenset(
    {
        *_EXPERTS, WIDTH_OF_EXPERTS, MORE_LAYERS, "expert_gating_func", "expert_shared_count",
        "expert_weights_scale", "expert_weights_norm", "expert_group_count", "expert_group_used_count",
        "leading_dense_block_count", "attention.q_lora_rank", "attention.kv_lora_rank",
        "attention.key_length_mla", "attention.value_length_mla", "rope.scaling.yarn_log_multiplier",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """What files of an architecture can be.

    Attributes:
        model_type: That of the config.
        reads: The keys that its files may have beside the common ones.
        interleaved: The rows of queries and keys are in the order of pairs that are beside each other.
        norm_offset: What the file's weights of norms have more than a checkpoint's.
        recurrent_without_heads: Its recurrent layers are those without heads of keys and values.
        norm_eps: The setting that is added to variances, and its key.
        settings: More settings, by the keys that have them.
        present: Settings that are true if layers have such a tensor.
        fixed: Settings that no file says.
        only: The values of keys that have no effect.
        rotates: The model rotates queries and keys.
        rotates_parts: It can rotate a part of each head.
        varies: Widths and numbers of heads may differ between layers, as its reader knows.
    """

    model_type: str
    reads: frozenset[str] = field(default_factory=frozenset)
    interleaved: bool = False
    norm_offset: float = 0.0
    recurrent_without_heads: bool = False
    norm_eps: tuple[str, str] = ("rms_norm_eps", RMS_EPS)
    settings: Mapping[str, str] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    only: Mapping[str, Value] = field(default_factory=lambda: _ONLY)
    rotates: bool = True
    rotates_parts: bool = True
    varies: bool = False


GPT_OSS, LATENT = "gpt-oss", "deepseek2"
_GEMMA_READS = frozenset({"attention.sliding_window", "final_logit_softcapping"})
QWEN_EXPERTS = frozenset({*_EXPERTS, WIDTH_OF_EXPERTS, "expert_gating_func", "expert_shared_count"})
_DELTA_RULE = SSM | {INTERVAL, RECURRENT_LAYERS, MORE_LAYERS}
# Of images, which have positions in three dimensions, and states that are added behind some layers. A text
# has the same position in all, and none of these states.
_SECTIONS = frozenset({"rope.dimension_sections"})
_IMAGES = _SECTIONS | {"n_deepstack_layers"}
_SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
_WINDOWS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_LEFT_OUT_LAYERS = {MORE_LAYERS: "mtp_num_hidden_layers"}
_DEEPSEEK_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    WIDTH_OF_EXPERTS: "moe_intermediate_size",
}
_MAMBA2 = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": "mamba_n_groups",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
}
_NEMOTRON = Architecture(
    "nemotron_h",
    SSM,
    recurrent_without_heads=True,
    norm_eps=("layer_norm_epsilon", RMS_EPS),
    settings={
        "ssm.conv_kernel": "conv_kernel",
        "ssm.group_count": "n_groups",
        "ssm.state_size": "ssm_state_size",
        "ssm.time_step_rank": "mamba_num_heads",
    },
    present={
        "attention_bias": "attn_q.bias",
        "mlp_bias": "ffn_up.bias",
        "use_bias": "ssm_in.bias",
        "use_conv_bias": "ssm_conv1d.bias",
    },
    rotates=False,
)
ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        frozenset({*_EXPERTS, "attention.sliding_window", "expert_gating_func", "expert_shared_count"}),
        interleaved=True,
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture("qwen2_moe", QWEN_EXPERTS | {SHARED_EXPERT}),
    "qwen3moe": Architecture("qwen3_moe", QWEN_EXPERTS),
    "qwen3next": Architecture("qwen3_next", _DELTA_RULE | QWEN_EXPERTS | {SHARED_EXPERT}, norm_offset=1.0),
    "qwen35": Architecture("qwen3_5_text", _DELTA_RULE | _SECTIONS, norm_offset=1.0),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", _DELTA_RULE | _SECTIONS | QWEN_EXPERTS | {SHARED_EXPERT}, norm_offset=1.0
    ),
    "lfm2": Architecture("lfm2", frozenset({"shortconv.l_cache"}), recurrent_without_heads=True),
    "lfm2moe": Architecture(
        "lfm2_moe",
        frozenset({"shortconv.l_cache"}),
        recurrent_without_heads=True,
        settings={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "leading_dense_block_count": "num_dense_layers",
            WIDTH_OF_EXPERTS: "moe_intermediate_size",
        },
        present={"use_expert_bias": "exp_probs_b.bias"},
        only=_SIGMOID,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        SSM,
        settings=_MAMBA2 | {"ssm.inner_size": "mamba_d_ssm"},
        present=_ATTENTION_BIAS
        | {
            "mamba_conv_bias": "ssm_conv1d.bias",
            "mamba_proj_bias": "ssm_in.bias",
            "mamba_rms_norm": "ssm_norm.weight",
            "mlp_bias": "ffn_up.bias",
            "projectors_bias": "ssm_out.bias",
        },
        # Its weights are multiplied already by what a config names.
        fixed={"mamba_norm_before_gate": False},
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(
        _NEMOTRON,
        settings={
            **_NEMOTRON.settings,
            **_LEFT_OUT_LAYERS,
            **_DEEPSEEK_EXPERTS,
            "moe_latent_size": "moe_latent_size",
            SHARED_EXPERT: "moe_shared_expert_intermediate_size",
        },
        only={"expert_gating_func": 2, "expert_shared_count": 1},
    ),
    "jamba": Architecture(
        "jamba",
        SSM,
        recurrent_without_heads=True,
        settings={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
            "expert_used_count": "num_experts_per_tok",
            "expert_count": "num_experts",
        },
        present={"mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"},
        rotates=False,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        SSM | _EXPERTS | _SCALES | {SHARED_EXPERT},
        interleaved=True,
        recurrent_without_heads=True,
    ),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture("gemma2", _GEMMA_READS | {"attn_logit_softcapping"}, norm_offset=1.0),
    "gemma3": Architecture(
        "gemma3_text",
        _GEMMA_READS | {"attention.sliding_window_pattern", "rope.freq_base_swa"},
        norm_offset=1.0,
    ),
    "phi3": Architecture("phi3", frozenset({"attention.sliding_window"})),
    GPT_OSS: Architecture(
        "gpt_oss",
        frozenset({*_EXPERTS, WIDTH_OF_EXPERTS, "attention.sliding_window"}),
    ),
    LATENT: Architecture("deepseek_v3", _LATENT, only={}),
    "granite": Architecture("granite", _SCALES, interleaved=True),
    "granitemoe": Architecture("granitemoeshared", _EXPERTS | _SCALES | {SHARED_EXPERT}, interleaved=True),
    "olmo2": Architecture("olmo2", _WINDOWS | {"rope.freq_base_swa"}),
    "smollm3": Architecture("smollm3", interleaved=True),
    "arcee": Architecture("arcee", interleaved=True),
    # What computes as another family does.
    "exaone": Architecture("llama"),
    "internlm2": Architecture("llama", interleaved=True),
    "ernie4_5": Architecture("llama", interleaved=True),
    "minicpm": Architecture("granite", _SCALES - {"attention.scale"}, interleaved=True),
    "seed_oss": Architecture("qwen2"),
    "qwen2vl": Architecture("qwen2", _SECTIONS),
    "qwen3vl": Architecture("qwen3", _IMAGES),
    "qwen3vlmoe": Architecture("qwen3_moe", QWEN_EXPERTS | _IMAGES),
    # Those that the transformers library runs.
    "command-r": Architecture(
        "cohere",
        norm_eps=("layer_norm_eps", LAYER_EPS),
        settings={"logit_scale": "logit_scale"},
        present={"use_qk_norm": "attn_q_norm.weight", "attention_bias": "attn_q.bias"},
        rotates_parts=False,
    ),
    "cohere2": Architecture(
        "cohere2",
        _WINDOWS,
        norm_eps=("layer_norm_eps", LAYER_EPS),
        settings={"logit_scale": "logit_scale"},
        present={"attention_bias": "attn_q.bias"},
        rotates_parts=False,
    ),
    "dots1": Architecture(
        "dots1",
        settings=_DEEPSEEK_EXPERTS,
        only=_SIGMOID,
        present=_ATTENTION_BIAS,
        fixed={"sliding_window": None},
        rotates_parts=False,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        # The width of shared experts follows from their number; what files say of it is another.
        frozenset({SHARED_EXPERT}),
        settings={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
            WIDTH_OF_EXPERTS: "moe_intermediate_size",
        },
        present={"use_bias": "attn_q.bias"},
        only={"expert_gating_func": 1},
        rotates_parts=False,
    ),
    "exaone4": Architecture("exaone4", _WINDOWS, rotates_parts=False),
    "gemma4": Architecture(
        "gemma4_text",
        _GEMMA_READS
        | {
            "attention.sliding_window_pattern",
            "attention.key_length_swa",
            "attention.value_length_swa",
            "rope.freq_base_swa",
            "rope.dimension_count_swa",
        },
        settings={
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "final_logit_softcapping": "final_logit_softcapping",
            WIDTH_OF_EXPERTS: "moe_intermediate_size",
        },
        present={"enable_moe_block": "ffn_gate_inp.weight", "attention_bias": "attn_q.bias"},
        rotates=False,  # as its reader knows
        varies=True,
    ),
    "glm4": Architecture(
        "glm4",
        settings=_LEFT_OUT_LAYERS,
        present=_ATTENTION_BIAS,
        fixed={"pad_token_id": None},  # the default may be no token of the model
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        settings=_DEEPSEEK_EXPERTS | _LEFT_OUT_LAYERS,
        present=_ATTENTION_BIAS | {"use_qk_norm": "attn_q_norm.weight"},
        only=_SIGMOID,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", present=_ATTENTION_BIAS, rotates_parts=False),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        # It has one shared expert, of the width that the others have.
        frozenset({WIDTH_OF_EXPERTS, SHARED_EXPERT}),
        settings={"expert_count": "num_experts", "expert_used_count": "moe_topk"},
        present=_ATTENTION_BIAS,
        only={"expert_gating_func": 1, "expert_shared_count": 1},
        rotates_parts=False,
    ),
    "mistral3": Architecture(
        "ministral3",
        frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}),
        interleaved=True,
    ),
    "nemotron": Architecture(
        "nemotron",
        norm_offset=1.0,
        norm_eps=("norm_eps", LAYER_EPS),
        present=_ATTENTION_BIAS | {"mlp_bias": "ffn_up.bias"},
    ),
    "olmo": Architecture(
        "olmo",
        interleaved=True,
        norm_eps=("layer_norm_eps", LAYER_EPS),
        settings={"attention.clamp_kqv": "clip_qkv"},
        rotates_parts=False,
    ),
    "olmoe": Architecture(
        "olmoe",
        frozenset({WIDTH_OF_EXPERTS}),
        settings={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        rotates_parts=False,
    ),
    "phi2": Architecture("phi", norm_eps=("layer_norm_eps", LAYER_EPS)),
    "stablelm": Architecture(
        "stablelm",
        norm_eps=("layer_norm_eps", LAYER_EPS),
        settings={"use_parallel_residual": "use_parallel_residual"},
        present={"use_qkv_bias": "attn_q.bias"},
    ),
    "starcoder2": Architecture(
        "starcoder2",
        norm_eps=("norm_epsilon", LAYER_EPS),
        present={"use_bias": "attn_q.bias"},
        fixed={"sliding_window": None},  # as llama.cpp, whose files have none
        rotates_parts=False,
    ),
}


def architecture_of(metadata: Mapping[str, Value]) -> tuple[str, Architecture]:
    """The name and the description of a file's architecture. Raises GgufError."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise GgufError(f"general.architecture: must be the name of an architecture, got {shown(name)}")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise GgufError(f"general.architecture: must be one of {known}, got {shown(name)}")
    return name, ARCHITECTURES[name]


def check_keys(name: str, architecture: Architecture, own: Mapping[str, Value]) -> None:
    """Raises GgufError for a key that may change the model, and is not read."""
    known = (
        _COMMON | _WITHOUT_EFFECT | architecture.reads | {architecture.norm_eps[1]}
        | architecture.settings.keys() | architecture.only.keys()
    )  # fmt: skip
    only = {"attention.causal": True, **architecture.only}
    for key, value in own.items():
        if key not in known or value != only.get(key, value):
            raise GgufError(f"{name}.{key}: is not supported, got {shown(value)}")
