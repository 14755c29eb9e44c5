"""Writes a model made by `weights.py` as GGUF, in bfloat16 or quantised, beside its safetensors.

Needs the packages `gguf` and, for quantised files, `llama-cpp-python` of the extra `bench`. In bfloat16 the
weights are the same bits; norms become float32, as llama.cpp's own converter makes them. Its quantiser makes
the quantised files from that one. There is no tokenizer: token ids are all that is measured.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import Shape
from benchmarks.weights import read_model

ARCHITECTURE = "qwen3"
GGUF_FILE = "model-bf16.gguf"

# Tensor names in a Hugging Face checkpoint and in a GGUF file.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_gguf(gguf: Any, directory: Path, shape: Shape) -> Path:
    """The GGUF file of a model's directory, created if needed. `gguf` is the package of that name."""
    path = directory / GGUF_FILE
    if path.exists():
        return path
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, ARCHITECTURE)
    _add_metadata(gguf, writer, shape)
    for name, bits in read_model(directory):
        if bits.ndim == 1:
            writer.add_tensor(_gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            # The package takes bfloat16 as bytes.
            writer.add_tensor(_gguf_name(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def make_quantised(llama: Any, source: Path, form: str) -> Path:
    """A GGUF file in a format such as "q4_k_m", beside that in bfloat16, created if needed.

    It has llama.cpp's mixture of formats for that name. `llama` is the package llama_cpp.
    """
    path = source.with_name(f"model-{form}.gguf")
    if path.exists():
        return path
    partial = path.with_suffix(".partial")
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{form.upper()}")
    if llama.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(parameters)):
        raise RuntimeError(f"llama.cpp cannot quantise {source} to {form}; its log says why")
    partial.rename(path)
    return path


def _add_metadata(gguf: Any, writer: Any, shape: Shape) -> None:
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("none")


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        index, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{_NAMES[rest]}.weight"
    return f"{_NAMES[stem]}.weight"
