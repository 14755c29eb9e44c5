"""Decoding of other families than the one of the benchmark: native code, the library over pages, the library.

`python -m benchmarks.families` makes a model of each shape with random bfloat16 weights, and lets three
competitors take turns in one process: native code, the transformers backend, and the library's own loop on
its DynamicCache. One sequence, eight, and thirty-two in a step, 128 tokens each before the first. Minutes;
prints a table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import machine
from benchmarks.peers.base import prompts
from benchmarks.peers.executor_peer import ExecutorPeer
from benchmarks.peers.transformers_peer import TransformersPeer

_SIZES: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "dtype": "bfloat16",
}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "head_dim": 64},
    "qwen3_moe": {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
    },
}
_BATCHES = (1, 8, 32)
_CONTEXT_TOKENS, _STEPS = 128, 8
_PLAIN = "transformers"


@dataclass(frozen=True)
class _Config:
    """What the peers read of a `PeerConfig`."""

    directory: Path
    threads: int
    vocab_size: int
    kv_pages: int = 32 * (_CONTEXT_TOKENS // 16 + 2)

    @property
    def shape(self) -> _Config:
        return self

    def model_dir(self) -> Path:
        return self.directory


class _DifferentTexts(TransformersPeer):
    """Its sequences are copies of one prompt: here each goes on with a token, and so experts, of its own."""

    def prepare_decode(self, batch: int, context_tokens: int) -> list[int]:
        tokens = super().prepare_decode(batch, context_tokens)
        self._first = torch.tensor(prompts(self._vocab_size, batch, 1))  # [B, 1]
        self._next = self._first
        return tokens


def _make(name: str, directory: Path) -> Path:
    config = AutoConfig.for_model(name, **_SIZES, **_MODELS[name])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)  # type: ignore[no-untyped-call]
    return directory


def _measure(config: Any, rounds: int) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "native": lambda: ExecutorPeer(config, backend="native"),
        "over pages": lambda: ExecutorPeer(config, backend="transformers"),
        _PLAIN: lambda: _DifferentTexts(config),
    }
    peers = {name: make() for name, make in makers.items()}
    for batch in _BATCHES:
        for peer in peers.values():
            peer.prepare_decode(batch, _CONTEXT_TOKENS)
        ms: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(rounds):
            for name, peer in peers.items():
                ms[name].append(statistics.median(peer.decode(_STEPS).ns) / 1e6)
        plain = statistics.median(ms[_PLAIN])
        cells = []
        for found in ms.values():
            middle = statistics.median(found)
            cells.append(f"{middle:.1f} ({min(found):.1f}-{max(found):.1f}), {plain / middle:.2f}x")
        print(f"| {config.directory.name} | {batch} | {' | '.join(cells)} |", flush=True)
        for peer in peers.values():
            peer.release()


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("--only", choices=sorted(_MODELS), help="one shape")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each competitor")
    options = parser.parse_args()
    print(machine.describe(), file=sys.stderr)
    names = ("native", "transformers over pages", "transformers itself")
    print(
        f"| shape | batch | {' | '.join(f'{name}, ms a step' for name in names)} |\n|---|---:|---:|---:|---:|"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for name in [options.only] if options.only else _MODELS:
            directory = _make(name, Path(scratch) / name)
            _measure(_Config(directory, torch.get_num_threads(), _SIZES["vocab_size"]), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
