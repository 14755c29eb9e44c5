"""GGUF files of small models, written by the gguf package as the converters of llama.cpp write them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedConfig

from tests import gguf_library as library
from tests import gguf_recurrent as recurrent
from workers.models.checkpoint import StoredTensor, read_entries
from workers.models.drawn_rows import drawn_blocks
from workers.models.registry import FAMILIES
from workers.models.stacked_experts import separated

NAMES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3",
    "gpt_oss": "gpt-oss", "qwen2_moe": "qwen2moe", **recurrent.NAMES,
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2",
    "olmo2": "olmo2", "olmo3": "olmo2", "smollm3": "smollm3", "arcee": "arcee", "granite": "granite",
    "granitemoe": "granitemoe", "granitemoeshared": "granitemoe", **library.NAMES,
}  # fmt: skip
# Of which the converters change the order of rows of queries and keys.
_INTERLEAVED = (
    *("llama", "smollm3", "arcee", "granite", "granitemoe", "internlm2", "ernie4_5", "minicpm", "baichuan"),
    *library.INTERLEAVED,
)
PRE_TOKENIZER = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2"}
# Of which norms have 1 more.
_NORMS = ("gemma", "gemma2", "gemma3", "nemotron")
# The converters never write these in another type.
_FLOAT32 = ("_norm.weight", "ssm_conv1d.weight", "shortconv.conv.weight", "ffn_gate_inp_shexp.weight")
# Types that the package can make of numbers. The others' blocks are drawn.
QUANTISED = {
    "q4_0": Type.Q4_0, "q4_1": Type.Q4_1, "q5_0": Type.Q5_0, "q5_1": Type.Q5_1, "q8_0": Type.Q8_0,
    "tq1_0": Type.TQ1_0,
}  # fmt: skip
DENSE = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16}
_XIELU = ".act_fn."
_NUMBERED = re.compile(r"(\.experts|\.altup(?:_unembed)?_projections)\.\d+\.")
TypeOf = Callable[[str], str]
"""The type of a matrix, by its name in a checkpoint."""


def write_gguf(
    path: Path,
    model: Path,
    type_of: TypeOf | str = "f16",
    *,
    tokenizer: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    max_shard_tensors: int = 0,
    architecture: str = "",
) -> Path:
    """Write the model of a directory, with random weights, as a file; returns it, or the first of several.

    Args:
        path: The file.
        model: A directory of transformers.
        type_of: The type of each matrix. Vectors are float32.
        tokenizer: Metadata below tokenizer.ggml.
        metadata: More metadata; None: a key is left out.
        max_shard_tensors: The most tensors in a file; 0: there is one.
        architecture: One whose models compute as this one; "": its own.
    """
    config = AutoConfig.from_pretrained(model)
    name = architecture or NAMES[config.model_type]
    if name == "nemotron_h" and "moe" in config.layers_block_type:
        name = "nemotron_h_moe"
    writer = gguf.GGUFWriter(path, name, split_max_tensors=max_shard_tensors)
    kinds = (recurrent, library)
    of_architecture = next(
        (kind.metadata for kind in kinds if NAMES[config.model_type] in kind.NAMES.values()), _metadata
    )
    keys = {f"{name}.{key}": value for key, value in of_architecture(name, config).items()}
    for key, value in (keys | {"general.name": "a tiny model"} | dict(metadata or {})).items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif value is not None:
            _add(writer, key, value)
    for key, value in (tokenizer or {}).items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    for key, numbers in _xielu(model, config).items():
        writer.add_array(f"xielu.{key}", numbers)
    for tensor_name, (values, kind) in made_tensors(name, config, model, type_of).items():
        _add_tensor(writer, tensor_name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not max_shard_tensors else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _metadata(name: str, config: PreTrainedConfig) -> dict[str, Any]:
    """As the converters write it, below the architecture."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters or {}
    full = rope.get("full_attention", rope)
    found: dict[str, Any] = {
        **library.sizes_of(config),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(full.get("rope_theta", 10_000.0)),
        "rope.dimension_count": int(head_dim * full.get("partial_rotary_factor", 1.0)),
    }
    if name != "phi3":
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    window = getattr(config, "sliding_window", None)
    if window is not None and name in ("llama", "gemma2", "gemma3", "phi3", "gpt-oss", "olmo2"):
        found["attention.sliding_window"] = window
    if "sliding_attention" in rope:
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if name in ("granite", "granitemoe", "minicpm"):
        found |= {
            "attention.scale": config.attention_multiplier if name != "minicpm" else None,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
        }
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None) is not None:
            found[key] = getattr(config, key)
    if full.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": float(full["factor"])}
    if "original_max_position_embeddings" in full and full.get("rope_type") != "llama3":
        found["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
    return found | (_latent(config, rope) if name == "deepseek2" else _experts(name, config))


def _latent(config: PreTrainedConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    """As `DeepseekV2Model` of conversion/deepseek.py."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    dense = getattr(config, "mlp_layer_types", []).count("dense") or config.first_k_dense_replace
    found = {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": width,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": dense,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }
    if config.model_type != "deepseek_v2":
        found |= {"expert_gating_func": 2, "expert_weights_norm": config.norm_topk_prob}
    if rope.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def _experts(name: str, config: PreTrainedConfig) -> dict[str, Any]:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not experts:
        return {}
    found = {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if name in ("qwen2moe", "qwen3moe", "qwen3vlmoe"):
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    if name == "qwen2moe":
        found["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if name == "granitemoe":
        found["expert_shared_feed_forward_length"] = getattr(config, "shared_intermediate_size", None)
    if name == "gpt-oss":
        found["expert_feed_forward_length"] = config.intermediate_size
    return found


def made_tensors(
    name: str, config: PreTrainedConfig, model: Path, type_of: TypeOf | str
) -> dict[str, tuple[np.ndarray[Any, Any], str]]:
    """Values and type of each tensor of the file."""
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found: dict[str, tuple[np.ndarray[Any, Any], str]] = {}
    experts: dict[str, list[np.ndarray[Any, Any]]] = {}
    for tensor_name, entry in _entries(model, config).items():
        if _XIELU in tensor_name:
            continue
        parts = [part.clone() for _, part in entry.parts() if isinstance(part, torch.Tensor)]
        kind_of_all = type_of if isinstance(type_of, str) else type_of(tensor_name)
        for changed_name, values in _changed(name, config, tensor_name, torch.cat(parts).float().numpy()):
            kind = kind_of_all
            merged = _without_expert(changed_name)
            is_of_experts = merged != changed_name
            merged += ".weight" if merged.endswith((".sinks", ".correct_output_scale")) else ""
            known = names.get_name(merged, try_suffixes=(".weight", ".bias"))
            written = merged if merged.startswith("blk.") else known
            assert written is not None, changed_name
            if values.ndim < 2 or not written.endswith(".weight") or written.endswith(_FLOAT32):
                kind = "f32"
            elif values.shape[-1] % gguf.GGML_QUANT_SIZES[Type[kind.upper()]][0]:
                kind = "q8_0"  # as llama.cpp, which has no blocks for such rows
            if "ffn_gate_inp" in written and kind not in DENSE:
                kind = "f32"  # llama.cpp quantises no routers.
            experts.setdefault(written, []).append(values)
            found[written] = np.stack(experts[written]) if is_of_experts else values, kind
    return found | _rope_factors(config)


def _changed(
    name: str, config: PreTrainedConfig, tensor: str, values: np.ndarray[Any, Any]
) -> Iterable[tuple[str, np.ndarray[Any, Any]]]:
    """What a converter makes of a tensor of a checkpoint."""
    if NAMES[config.model_type] in recurrent.NAMES.values():
        return recurrent.tensors(name, config, tensor, values)
    if name in _NORMS and tensor.endswith("norm.weight"):
        values = values + 1
    if name in _INTERLEAVED and ".q_proj." in tensor:
        values = _interleaved(values, config.num_attention_heads)
    if name in _INTERLEAVED and ".k_proj." in tensor:
        values = _interleaved(values, config.num_key_value_heads)
    if name == "gemma4":
        block = f"blk.{tensor.split('.')[2]}"
        own = {
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "experts.down_proj": "ffn_down_exps.weight",
        }
        known = next((f"{block}.{file}" for end, file in own.items() if tensor.endswith(f".{end}")), tensor)
        return [(known + ".weight" * tensor.endswith("layer_scalar"), values)]
    if ".kv_b_proj." in tensor:
        heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, others = np.split(heads, [config.qk_nope_head_dim], axis=1)
        keys_name, values_name = (tensor.replace("kv_b", part) for part in ("k_b", "v_b"))
        return [(keys_name, keys.swapaxes(1, 2)), (values_name, others)]
    if ".shared_mlp.input_linear." in tensor:
        gate, up = np.split(values, 2)
        layer = tensor.split(".")[2]
        return [(f"blk.{layer}.ffn_gate_shexp.weight", gate), (f"blk.{layer}.ffn_up_shexp.weight", up)]
    known = tensor.replace("e_score_correction_bias", "e_score_correction.bias")
    known = known.replace("mlp.expert_bias", "mlp.expert_bias.bias")
    if name == "ernie4_5-moe" and known != tensor:
        values = values.reshape(-1)
    if name == "granitemoe":
        known = known.replace("block_sparse_moe.experts", "mlp.experts")
    return [(known, values)]


def _entries(model: Path, config: PreTrainedConfig) -> Mapping[str, StoredTensor]:
    experts = FAMILIES[config.model_type].experts if config.model_type in FAMILIES else None
    entries = read_entries(model)
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((config.to_dict()[key] for key in counts if config.to_dict().get(key)), 0)
    if experts is None or experts.stacked is None or not count:
        return entries
    return separated(entries, experts, count, config.hidden_size)


def _xielu(model: Path, config: PreTrainedConfig) -> dict[str, list[float]]:
    """The numbers of an activation, of each layer, by their names in a checkpoint."""
    found: dict[str, list[float]] = {}
    for name, entry in _entries(model, config).items():
        if _XIELU in name:
            found.setdefault(name.rpartition(".")[2], []).extend(
                float(part) for _, part in entry.parts() if isinstance(part, torch.Tensor)
            )
    return found


def _rope_factors(config: PreTrainedConfig) -> dict[str, tuple[np.ndarray[Any, Any], str]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type == "gemma4_text":
        width = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
        rotated = int(width * rope["full_attention"]["partial_rotary_factor"])
        factors = [1.0] * rotated + [1e30] * (width - rotated)
        return {"rope_freqs.weight": (np.array(factors, np.float32), "f32")}
    match rope.get("rope_type"):
        case "llama3":
            return {"rope_freqs.weight": (_llama3_factors(config, rope), "f32")}
        case "longrope":
            return {
                f"rope_factors_{length}.weight": (np.array(rope[f"{length}_factor"], np.float32), "f32")
                for length in ("long", "short")
            }
    return {}


def _without_expert(name: str) -> str:
    """The name of the tensor of all experts: entries of a directory are in the order of their numbers."""
    return _NUMBERED.sub(r"\1.", name)


def _interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a head in the order of llama.cpp's rotation: `LlamaModel.permute` of its converter."""
    pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _llama3_factors(config: PreTrainedConfig, rope: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """What divides the frequencies: `generate_extra_tensors` of the converter of llama."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    factors = []
    for frequency in frequencies:
        wavelength = 2 * torch.pi / frequency
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / factor + smooth)))
    return np.array(factors, dtype=np.float32)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], kind: str) -> None:
    if kind == "f32":
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    elif kind == "f16":
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float16))
    else:
        raw_type = (DENSE | QUANTISED).get(kind)
        if raw_type is None:
            raw_type, (*outputs, inputs) = Type[kind.upper()], values.shape
            rows = math.prod(outputs)
            drawn = drawn_blocks(kind, (rows, inputs), 1.5 * inputs**-0.5, rows)
            blocks = drawn.view(*outputs, drawn.shape[1]).numpy()
        else:
            blocks = gguf.quantize(values, raw_type)
        writer.add_tensor(name, blocks, raw_dtype=raw_type)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


@dataclass(frozen=True)
class Vocabulary:
    """The metadata of a tokenizer, below tokenizer.ggml."""

    metadata: Mapping[str, Any]

    def write_to(self, writer: gguf.GGUFWriter) -> None:
        """Write a file with nothing else but an embedding."""
        for key, value in self.metadata.items():
            _add(writer, f"tokenizer.ggml.{key}", value)
        writer.add_tensor("token_embd.weight", np.zeros((len(self.metadata["tokens"]), 2), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def byte_level(pre: str, **more: Any) -> Vocabulary:
    """BPE over bytes, trained on a page of English; with tokens for the begin, the end and a role."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        _text(), trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(made.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get)]
    count = len(tokens)
    return Vocabulary(
        {
            "model": "gpt2",
            "pre": pre,
            "tokens": [*tokens, "<|bos|>", "<|eot|>", "<|user|>"],
            "token_type": [1] * count + [3, 3, 4],
            "merges": [" ".join(pair) for pair in model["merges"]],
            "bos_token_id": count,
            "eos_token_id": count + 1,
            **more,
        }
    )


def sentencepiece(*, lists_merges: bool = False, **more: Any) -> Vocabulary:
    """As `byte_level`, over characters, with a token for each byte and with scores; or as that of gemma4."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        _text(), trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    model = json.loads(made.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    if lists_merges:
        more |= {"model": "gemma4", "merges": [" ".join(pair) for pair in model["merges"]]}
    ranks = {first + second: rank for rank, (first, second) in enumerate(model["merges"])}
    return Vocabulary(
        {
            "model": "llama",
            "tokens": [*tokens, "<|eot|>", "<|user|>"],
            "scores": [-float(ranks.get(token, 10_000)) for token in (*tokens, "", "")],
            "token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259) + [3, 4],
            "unknown_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **more,
        }
    )


def _text() -> list[str]:
    """A text that does not change: with other vocabularies, models of random weights write other texts."""
    return [(Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")]
