"""Decode speed of other model families: native code, the transformers backend, and transformers itself.

`python -m benchmarks.families` creates a model of each shape with random bfloat16 weights. Three competitors
alternate in one process: native code, the transformers backend, and a loop with transformers' DynamicCache. A
step has one, eight or thirty-two sequences with a context of 128 tokens. It takes minutes and prints a table.

All append the same random tokens at each step. With its own tokens, a model with random weights soon
generates the same ones in every sequence, so that sequences share experts. For a mixture of experts the table
shows how many experts of a layer each competitor read in a step, and the library's fastest
`experts_implementation`.
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
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import machine
from benchmarks.peers.base import SETTLING_STEPS, prompts
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
    """The attributes of a `PeerConfig` that the peers use."""

    directory: Path
    threads: int
    vocab_size: int
    kv_pages: int = 32 * (_CONTEXT_TOKENS // 16 + 2)

    @property
    def shape(self) -> _Config:
        return self

    def model_dir(self) -> Path:
        return self.directory


class _Routes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the experts that each layer reads. In every implementation the router calls topk."""

    def __init__(self, experts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._experts = experts
        self.counts: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default and args[0].shape[-1] == self._experts:
            self.counts.append(len(result[1].unique()))
        return result


def _make(name: str, directory: Path) -> Path:
    config = AutoConfig.for_model(name, **_SIZES, **_MODELS[name])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)  # type: ignore[no-untyped-call]
    return directory


def _measure(config: Any, experts: int, rounds: int) -> None:
    """`experts`: of a layer; 0 where there is no choice of them."""
    makers: dict[str, Callable[[], Any]] = {
        "native": lambda: ExecutorPeer(config, backend="native"),
        "over pages": lambda: ExecutorPeer(config, backend="transformers"),
        _PLAIN: lambda: TransformersPeer(config, own_prompts=True),
    }
    peers = {name: make() for name, make in makers.items()}
    for batch in _BATCHES:
        tokens = prompts(config.vocab_size, SETTLING_STEPS + _STEPS, batch, seed=1)
        for peer in peers.values():
            peer.prepare_decode(batch, _CONTEXT_TOKENS)
            peer.feed(tokens)
        notes = _look_at_experts(peers, experts) if experts else ""
        ms: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(rounds):
            for name, peer in peers.items():
                ms[name].append(statistics.median(peer.decode(_STEPS).ns) / 1e6)
        plain = statistics.median(ms[_PLAIN])
        cells = []
        for found in ms.values():
            middle = statistics.median(found)
            cells.append(f"{middle:.1f} ({min(found):.1f}-{max(found):.1f}), {plain / middle:.2f}x")
        print(f"| {config.directory.name} | {batch} | {' | '.join(cells)} | {notes} |", flush=True)
        for peer in peers.values():
            peer.release()


def _look_at_experts(peers: dict[str, Any], experts: int) -> str:
    """Chooses the library's expert implementation; reports it, and how many experts each competitor reads."""
    way = peers[_PLAIN].use_fastest_experts()
    means = []
    for peer in peers.values():
        with _Routes(experts) as routes:
            peer.decode(_STEPS)
        means.append(f"{statistics.mean(routes.counts):.1f}")
    return f"{', '.join(means)} of {experts} experts; {way}"


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("--only", choices=sorted(_MODELS), help="one shape")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each competitor")
    options = parser.parse_args()
    print(machine.describe(), file=sys.stderr)
    names = ("native", "transformers over pages", "transformers itself")
    print(
        f"| shape | batch | {' | '.join(f'{name}, ms a step' for name in names)} | experts |\n"
        "|---|---:|---:|---:|---:|---|"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for name in [options.only] if options.only else _MODELS:
            directory = _make(name, Path(scratch) / name)
            config = _Config(directory, torch.get_num_threads(), _SIZES["vocab_size"])
            _measure(config, _MODELS[name].get("num_experts", 0), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
