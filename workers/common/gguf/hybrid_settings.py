"""Translates the metadata of GGUF files: what is read for hybrid architectures only.

Sources: as for `workers.common.gguf.settings`.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.common.gguf import GgufError
from workers.common.gguf.architectures import KV_HEADS, RECURRENT_LAYERS, SHARED_EXPERT, SSM, WIDTH
from workers.common.gguf.file_settings import FileSettings
from workers.common.gguf.header import shown

FULL, LINEAR = "full_attention", "linear_attention"


def delta_rule(file: FileSettings) -> dict[str, object]:
    """The gated delta rule of qwen35 and qwen3next. Raises GgufError."""
    layers = file.settings["num_hidden_layers"]
    found: dict[str, object] = {
        "linear_value_head_dim": _head_width(file),
        # Older files of qwen3next have the rows of each key head together, as a checkpoint has.
        "gguf_layout": not file.has("ssm_in.weight"),
    }
    listed = file.own.get(RECURRENT_LAYERS)
    if listed is not None:
        if not isinstance(listed, list) or not isinstance(layers, int) or len(listed) < layers:
            raise GgufError(
                f"{file.name}.{RECURRENT_LAYERS}: must be of {layers} layers, got {shown(listed)}"
            )
        found["layer_types"] = [LINEAR if one else FULL for one in listed[:layers]]
    return found


def mamba2(file: FileSettings) -> dict[str, object]:
    """Mamba 2, and what else granitehybrid has. Raises GgufError."""
    has_experts, width_of_mlp = file.own.get("expert_count"), file.settings["intermediate_size"]
    return {
        **granite_scales(file),
        "shared_intermediate_size": file.own.get(SHARED_EXPERT, 0) if has_experts else width_of_mlp,
        "mamba_d_head": _head_width(file),
        "mamba_expand": _expansion(file),
        # So its converter says whether positions are rotated.
        "position_embedding_type": "rope" if file.own.get("rope.scaling.finetuned", True) else "nope",
        "layer_types": _layer_types(file, LINEAR),
    }


def granite_scales(file: FileSettings) -> dict[str, object]:
    """What Granite multiplies by."""
    found: dict[str, object] = {
        setting: file.own[key]
        for setting, key in (
            ("attention_multiplier", "attention.scale"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("logits_scaling", "logit_scale"),
        )
        if file.own.get(key)  # llama.cpp too takes 0 for 1
    }
    head_dim = file.settings["head_dim"]
    if "attention_multiplier" not in found and isinstance(head_dim, int) and head_dim > 0:
        found["attention_multiplier"] = head_dim**-0.5  # as llama.cpp does; the library has another default
    return found


def falcon_h1(file: FileSettings) -> dict[str, object]:
    """Raises GgufError."""
    return {"mamba_d_head": _head_width(file)}


def nemotron(file: FileSettings) -> dict[str, object]:
    """Each layer is one of three. Raises GgufError."""
    kv_heads, widths = file.own.get(KV_HEADS), file.own.get(WIDTH)
    layers = file.settings["num_hidden_layers"]
    if not (isinstance(kv_heads, list) and isinstance(widths, list) and len(kv_heads) == len(widths)):
        raise GgufError(f"{file.name}.{WIDTH}: must be a list as long as {KV_HEADS}, got {shown(widths)}")
    mlp = "moe" if "expert_count" in file.own else "mlp"
    kinds = [
        FULL if heads else mlp if of_mlp else LINEAR
        for heads, of_mlp in zip(kv_heads[:layers], widths[:layers], strict=True)
    ]
    return {"mamba_head_dim": _head_width(file), "layers_block_type": kinds}


def jamba(file: FileSettings) -> dict[str, object]:
    """Raises GgufError."""
    kinds = _layer_types(file, LINEAR)
    has_experts = [f"blk.{index}.ffn_gate_inp.weight" in file.tensors for index in range(len(kinds))]
    found: dict[str, object] = {"mamba_expand": _expansion(file)}
    found |= _period(f"{file.name}.{KV_HEADS}", "attn", [kind == FULL for kind in kinds])
    return found | (_period("experts", "expert", has_experts) if any(has_experts) else {"num_experts": 1})


def mamba(file: FileSettings) -> dict[str, object]:
    """Mamba 1, or that of Falcon, which has norms."""
    own: dict[str, object] = {"intermediate_size": file.own.get("ssm.inner_size")}
    return own | ({"model_type": "falcon_mamba"} if file.own.get("ssm.dt_b_c_rms") else {})


def plain_mamba2(file: FileSettings) -> dict[str, object]:
    """Mamba 2 without attention. Raises GgufError."""
    return {"expand": _expansion(file), "head_dim": _head_width(file)}


def _period(what: str, name: str, layers: Sequence[bool]) -> dict[str, object]:
    """Which layers they are, as a config says it. Raises GgufError for those that it cannot say."""
    where = [index for index, is_one in enumerate(layers) if is_one]
    period = where[1] - where[0] if len(where) > 1 else len(layers)
    if not where or where != [*range(where[0], len(layers), period)] or where[0] >= period:
        raise GgufError(f"{what}: must be in layers with one distance, got {where}")
    return {f"{name}_layer_period": period, f"{name}_layer_offset": where[0]}


def short_conv(file: FileSettings) -> dict[str, object]:
    """The settings of lfm2. Raises GgufError."""
    return {"layer_types": _layer_types(file, "conv")}


def _layer_types(file: FileSettings, recurrent: str) -> list[str]:
    """Layers without heads of keys and values have a state. Raises GgufError unless the file has a list."""
    counts = file.own.get(KV_HEADS)
    if not isinstance(counts, list):
        raise GgufError(f"{KV_HEADS}: must be a list, with 0 for each recurrent layer, got {shown(counts)}")
    return [FULL if count else recurrent for count in counts]


def _expansion(file: FileSettings) -> int:
    """How many times the hidden width a scan has. Raises GgufError."""
    inner, hidden = file.own.get("ssm.inner_size"), file.settings["hidden_size"]
    if type(inner) is not int or type(hidden) is not int or hidden < 1 or inner % hidden:
        raise GgufError(
            f"{file.name}.ssm.inner_size: must be a multiple of {shown(hidden)}, got {shown(inner)}"
        )
    return inner // hidden


def _head_width(file: FileSettings) -> int:
    """The width of a scan's head. Raises GgufError, also for another key that is missing."""
    for key in sorted(SSM):
        value = file.own.get(key)
        if type(value) is not int or value < 1:
            raise GgufError(f"{file.name}.{key}: must be a positive integer, got {shown(value)}")
    inner, heads = file.own["ssm.inner_size"], file.own["ssm.time_step_rank"]
    assert isinstance(inner, int) and isinstance(heads, int)
    if inner % heads:
        raise GgufError(f"{file.name}.ssm.inner_size: must be a multiple of {heads} heads, got {inner}")
    return inner // heads
