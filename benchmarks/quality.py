"""What quantising costs in quality, beside llama.cpp: `python -m benchmarks.quality`. Prints a table.

For each format one GGUF file, made by llama.cpp's quantiser, is read by a gateway and by llama.cpp. Both give
rows of logits for the same texts, and both are compared with the weights in bfloat16, which transformers
computes in float32. The KL divergence is that of the reference from the quantised distribution, in nats.

The model is the shipped storyteller. The texts are those that it was trained for, from another seed, and what
it writes itself is scored: stories and the assistant's turns. Its matrices have 128 columns, and blocks of
q4_k have 256 weights; `_widen` therefore doubles them, which does not change what the model computes.

Needs the extra `bench`. No time is measured, so the machine need not be idle.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from quire.v1 import executor_pb2, types_pb2
from safetensors.torch import load_file, save_file

from benchmarks import machine
from benchmarks.checkout import ROOT
from benchmarks.gateway_process import GatewayProcess
from benchmarks.gguf_file import make_gguf, make_quantised
from benchmarks.peers.base import optional
from benchmarks.shapes import Shape
from benchmarks.weights import MODEL_FILE

_STORYTELLER = ROOT / "workers" / "models" / "storyteller"
_WIDE = Shape(
    name="storyteller-wide",
    vocab_size=1280,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
    rope_theta=10_000.0,
)
# That of the evaluation in .ci/train_storyteller.py.
_SEED = 20_261
_TIMEOUT_S = 120.0
_FORMATS = ("bf16", "q8_0", "q4_0", "q4_k_m")
# Its arithmetic is that of the model's dtype, which is bfloat16; llama.cpp's is float32.
_FLOAT32 = ["--dtype", "float32"]
_SERVICES = {
    "Quire": ["--dtype", "bfloat16"],
    "KV in int8": ["--dtype", "bfloat16", "--kv-cache-dtype", "int8"],
    "--dtype float32": _FLOAT32,
    "--dtype float32, KV in bfloat16": [*_FLOAT32, "--kv-cache-dtype", "bfloat16"],
    "--dtype float32, KV in int8": [*_FLOAT32, "--kv-cache-dtype", "int8"],
    "--dtype float32, activations not rounded": [*_FLOAT32, "--activation-quantization", "none"],
}
# GGML_TYPE_F16, the default of llama.cpp, and GGML_TYPE_Q8_0.
_LLAMA_CPP_KV = {"llama.cpp": 1, "llama.cpp, KV in q8_0": 8}

Logits = list[NDArray[np.float32]]
"""Of each text [tokens, vocabulary]."""


def main() -> None:
    """Computes and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--texts", type=int, default=200, metavar="N")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "benchmarks" / "models")
    options = parser.parse_args()
    directory = options.cache.resolve() / _WIDE.name
    _widen(directory)
    texts = _texts(options.texts)
    reference = _Reference(texts, _in_float32(texts))
    llama, source = optional("llama_cpp"), make_gguf(optional("gguf"), directory, _WIDE)
    print(f"{machine.describe()}\nllama-cpp-python {llama.__version__}")
    tokens = sum(len(text.scored) for text in texts)
    print(f"{len(texts)} texts, {tokens} tokens; perplexity in float32: {reference.perplexity:.5f}\n")
    columns = ("", "", "mean KL", "99%", "other likeliest", "perplexity", "mean over llama.cpp's; difference")
    print("KL in 1e-6 nats; a difference with its standard error\n")
    print(f"| {' | '.join(columns)} |\n| --- | --- | {' | '.join(['---:'] * len(columns[2:]))} |")
    for form in _FORMATS:
        path = source if form == "bf16" else make_quantised(llama, source, form)
        of_llama_cpp = {
            name: reference.compare(_by_llama_cpp(llama, path, texts, kv_type))
            for name, kv_type in _LLAMA_CPP_KV.items()
        }
        for name, found in of_llama_cpp.items():
            print(f"| {form} | {name} | {found} | |")
        theirs = of_llama_cpp["llama.cpp"]
        for name, flags in _SERVICES.items():
            ours = reference.compare(_by_service(path, flags, texts))
            more = ours.kl - theirs.kl
            error = more.std() / math.sqrt(len(more))
            ratio = ours.kl.mean() / theirs.kl.mean()
            print(f"| {form} | {name} | {ours} | {ratio:.3f}; {more.mean() * 1e6:.2f} +- {error * 1e6:.2f} |")


@dataclass(frozen=True)
class _Text:
    """A text's tokens, and the places of those that are scored, none of which is the first."""

    token_ids: list[int]
    scored: list[int]


@dataclass(frozen=True)
class _Comparison:
    """Of all scored tokens [N]: the KL divergence, and whether another token is the likeliest."""

    kl: NDArray[np.float64]
    differs: NDArray[np.bool_]
    perplexity: float

    def __str__(self) -> str:
        kl, largest = self.kl.mean() * 1e6, np.percentile(self.kl, 99) * 1e6
        return f"{kl:.2f} | {largest:.1f} | {self.differs.mean():.2%} | {self.perplexity:.5f}"


class _Reference:
    """The distributions that others are compared with."""

    def __init__(self, texts: Sequence[_Text], logits: Logits) -> None:
        self._texts, self._logprobs = texts, self._logprobs_of(texts, logits)  # [N, V]
        tokens = [text.token_ids[place] for text in texts for place in text.scored]
        self._chosen = np.arange(len(tokens)), np.array(tokens)
        self.perplexity = self._perplexity_of(self._logprobs)

    def compare(self, logits: Logits) -> _Comparison:
        """These with the reference."""
        wanted, found = self._logprobs, self._logprobs_of(self._texts, logits)
        kl = (np.exp(wanted) * (wanted - found)).sum(-1)
        return _Comparison(kl, wanted.argmax(-1) != found.argmax(-1), self._perplexity_of(found))

    def _perplexity_of(self, logprobs: NDArray[np.float64]) -> float:
        return math.exp(-logprobs[self._chosen].mean())

    @staticmethod
    def _logprobs_of(texts: Sequence[_Text], logits: Logits) -> NDArray[np.float64]:
        pairs = zip(texts, logits, strict=True)
        rows = np.concatenate([found[np.array(text.scored) - 1] for text, found in pairs]).astype(np.float64)
        rows -= rows.max(-1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
        return rows


def _widen(directory: Path) -> None:
    """Writes the storyteller with twice its width, if needed.

    Each hidden value and each value of an MLP is there twice, and what multiplies the copies is halved: an
    exact division, also in bfloat16. The mean square, which norms divide by, stays the same.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / MODEL_FILE).exists():
        return
    tensors = load_file(_STORYTELLER / MODEL_FILE)
    wide = {"lm_head.weight": (tensors["model.embed_tokens.weight"] / 2).tile(1, 2)}
    for name, tensor in tensors.items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            wide[name] = (tensor / 2).tile(1, 2)
        elif kind in ("gate_proj", "up_proj", "down_proj"):
            wide[name] = (tensor / 2).tile(2, 2)
        elif kind == "o_proj":
            wide[name] = tensor.tile(2, 1)
        elif kind in ("q_norm", "k_norm"):
            wide[name] = tensor
        else:  # Other norms [H], and the embedding [V, H].
            wide[name] = tensor.tile(2) if tensor.dim() == 1 else tensor.tile(1, 2)
    (directory / "config.json").write_text(json.dumps(_WIDE.hf_config()), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in wide.items()}, directory / MODEL_FILE)


def _texts(count: int) -> list[_Text]:
    """Texts as in training. What has a weight in the loss is scored."""
    sys.path.append(str(ROOT / ".ci"))
    rows = importlib.import_module("train_storyteller").Rows(
        transformers.AutoTokenizer.from_pretrained(_STORYTELLER), _SEED
    )
    found = []
    for _ in range(count):
        token_ids, weights = rows.row()
        found.append(_Text(token_ids, [place for place, weight in enumerate(weights) if place and weight]))
    return found


def _in_float32(texts: Sequence[_Text]) -> Logits:
    """Those of the model as it is shipped. What is read in bfloat16 agrees, so `_widen` does what it says."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(_STORYTELLER, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([text.token_ids])).logits[0].numpy() for text in texts]


def _by_service(path: Path, flags: Sequence[str], texts: Sequence[_Text]) -> Logits:
    output = types_pb2.OutputOptions(logits=types_pb2.DATA_TYPE_F32)
    requests = [executor_pb2.ForwardRequest(token_ids=text.token_ids, output=output) for text in texts]
    with GatewayProcess(model=str(path), flags=flags) as gateway:
        answers = [gateway.stub.Forward(request, timeout=_TIMEOUT_S) for request in requests]
    return [
        np.stack([np.frombuffer(row.logits.data, np.float32) for row in answer.outputs]) for answer in answers
    ]


def _by_llama_cpp(llama: Any, path: Path, texts: Sequence[_Text], kv_type: int) -> Logits:
    llama.llama_log_set(_IGNORE, ctypes.c_void_p())
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = _WIDE.max_position_embeddings
    parameters.type_k = parameters.type_v = kv_type
    # Values are quantised only with it.
    parameters.flash_attn_type = 1
    parameters.n_threads = parameters.n_threads_batch = 1
    context = llama.llama_init_from_model(model, parameters)
    batch = llama.llama_batch_init(_WIDE.max_position_embeddings, 0, 1)
    found = []
    for text in texts:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        batch.n_tokens = len(text.token_ids)
        for index, token in enumerate(text.token_ids):
            batch.token[index], batch.pos[index] = token, index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, True
        if llama.llama_decode(context, batch):
            raise RuntimeError(f"llama.cpp cannot compute {path}")
        rows = np.ctypeslib.as_array(llama.llama_get_logits(context), (batch.n_tokens, _WIDE.vocab_size))
        found.append(rows.copy())
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return found


# Kept here, because llama.cpp calls it as long as the process lives.
_IGNORE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


if __name__ == "__main__":
    main()
