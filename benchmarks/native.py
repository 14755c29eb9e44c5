"""Native code beside the library's, over the same pages: `python -m benchmarks.native falcon_h1 jamba`.

Without names: all of `SHAPES`. Each is that of a published model with fewer layers, experts and tokens in the
vocabulary, with random weights in bfloat16. Both run in one process, in turns, after one that is not counted.
Prints medians in milliseconds, and how many times faster native code is. On a busy machine only ratios mean
something. Needs the memory of a model twice.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.in_process import LlmExecutor
from workers.outputs import GREEDY

_VOCAB, _PROMPT, _CONTEXT, _TEXTS, _TURNS = 32_000, 256, 32, 8, 5
_LAYERS_OF_4 = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
# By the type: settings of the config, besides those of all.
SHAPES: dict[str, dict[str, Any]] = {
    "falcon_h1": {  # 0.5B
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_state": 128,
        "key_multiplier": 0.5,
        "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
    },
    "jamba": {  # Jamba Reasoning 3B
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 20,
        "num_key_value_heads": 1,
        "num_experts": 1,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
    },
    "kimi_linear": {  # 48B-A3B
        "num_hidden_layers": 4,
        "layer_types": _LAYERS_OF_4,
        "num_experts": 16,
    },
    "lfm2_moe": {  # 8B-A1B
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
    "nemotron_h": {  # Nemotron 3 Nano 30B-A3B
        "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
        "hidden_size": 2688,
        "num_key_value_heads": 2,
        "mamba_num_heads": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    },
    "qwen3_5_text": {  # 0.8B
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "layer_types": 2 * _LAYERS_OF_4,
        "linear_num_value_heads": 16,
    },
}


def _save(model_type: str, directory: Path) -> None:
    settings = {"vocab_size": _VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, **settings, **SHAPES[model_type])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)


def _turns(executor: LlmExecutor) -> Mapping[str, Callable[[], object]]:
    """What is measured, by name. Sequences 0 to `_TEXTS` - 1 grow, another one is made again each time."""
    tokens = [number * 31 % _VOCAB for number in range(_PROMPT)]
    for text in range(_TEXTS):
        executor.prefill(text, [text + 3, *tokens[:_CONTEXT]])

    def prefill() -> None:
        # Of another beginning each time, so that nothing of it is known.
        executor.prefill(_TEXTS, [time.perf_counter_ns() % _VOCAB, *tokens[1:]])
        executor.release_cache(_TEXTS)

    return {
        "decode of 1": lambda: executor.decode(0, 7),
        f"decode of {_TEXTS}": lambda: executor.batch_decode([(text, 7, GREEDY) for text in range(_TEXTS)]),
        f"prefill of {_PROMPT}": prefill,
    }


def _measure(model_type: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        _save(model_type, Path(name))
        executors = {
            backend: LlmExecutor.load(
                Path(name), dtype="bfloat16", kv_pages=400, backend=backend, self_check=False
            )
            for backend in ("native", "transformers")
        }
    turns = {backend: _turns(executor) for backend, executor in executors.items()}
    for kind in turns["native"]:
        times: dict[str, list[float]] = {backend: [] for backend in turns}
        for _ in range(1 + _TURNS):
            for backend, of_backend in turns.items():
                begin = time.perf_counter()
                of_backend[kind]()
                times[backend].append(1000 * (time.perf_counter() - begin))
        ours, theirs = (median(each[1:]) for each in times.values())
        print(
            f"{model_type:14} {kind:15} {ours:8.1f} ms, library {theirs:8.1f} ms, {theirs / ours:.1f}",
            flush=True,
        )


def main() -> None:
    """See the module."""
    logging.disable(logging.WARNING)
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    for model_type in sys.argv[1:] or SHAPES:
        _measure(model_type)


if __name__ == "__main__":
    main()
