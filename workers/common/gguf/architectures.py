"""The architectures of GGUF files, and the keys that their files may have.

A key that is not listed refuses the file, since it may change the model. Sources: as for
`workers.common.gguf.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.common.gguf import GgufError
from workers.common.gguf.header import Value, shown

# Settings of a config.json, and the keys that have them. Without one of the first the model is not known.
NEEDED = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
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
    WIDTH, KV_HEADS, "attention.key_length", "attention.value_length", "vocab_size",
    "rope.freq_base", "rope.dimension_count", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}  # fmt: skip
# They say where a file is from.
_WITHOUT_EFFECT = {"rope.scaling.finetuned", "tensor_data_layout", "attention.causal"}
_EXPERTS = frozenset({"expert_count", "expert_used_count"})
SHARED_EXPERT = "expert_shared_feed_forward_length"
# Values without an effect: softmax, and no shared experts but those whose width is named.
_ONLY = {"attention.causal": True, "expert_gating_func": 1, "expert_shared_count": 0}
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
    """

    model_type: str
    reads: frozenset[str] = field(default_factory=frozenset)
    interleaved: bool = False
    norm_offset: float = 0.0
    recurrent_without_heads: bool = False


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
    LATENT: Architecture("deepseek_v3", _LATENT),
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
    only = {} if name == LATENT else _ONLY
    for key, value in own.items():
        if key not in _COMMON | _WITHOUT_EFFECT | architecture.reads or value != only.get(key, value):
            raise GgufError(f"{name}.{key}: is not supported, got {shown(value)}")
