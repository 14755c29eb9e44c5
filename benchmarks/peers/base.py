"""The base class of competitors, which run as separate processes and measure themselves.

Each runs in its own process (`peer_process.py`), so that thread pools, interpreters and memory peaks are
separate. Methods are called by name with JSON arguments, and return JSON.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gguf_file import make_gguf, make_quantised
from benchmarks.shapes import SHAPES, Shape
from benchmarks.weights import make_model

# Steps before the measured ones of a turn, while the caches of the CPU still hold another competitor's data.
SETTLING_STEPS = 1


class Unavailable(Exception):
    """The competitor is not installed or not built, which is not a failure."""


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """The configuration of a competitor.

    Attributes:
        name: What the plan calls it: the kind of peer; behind a space the format of its weights, if they are
            quantised; "@before" if it is of another checkout.
        root: The checkout whose code it measures.
        cache: Where models are kept.
        kv_pages: Pages of 16 tokens for Quire's executors, the same in process and behind the gateway.
        rehearsal: On a GPU's peers: everything small, on the CPU.
    """

    name: str
    root: Path
    shape_name: str
    cache: Path
    threads: int
    kv_pages: int
    rehearsal: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of the measured model."""
        return SHAPES[self.shape_name]

    @property
    def kind(self) -> str:
        """The kind of peer."""
        return self.name.partition("@")[0].partition(" ")[0]

    @property
    def quantised(self) -> str:
        """The format of the GGUF file that is measured; empty: bfloat16."""
        return self.name.partition("@")[0].partition(" ")[2]

    def model_dir(self) -> Path:
        """The model's Hugging Face directory, created if needed."""
        return make_model(self.shape, self.cache)

    def gguf_file(self) -> Path:
        """The model as GGUF, created if needed. Raises Unavailable if packages are missing."""
        path = make_gguf(optional("gguf"), self.model_dir(), self.shape)
        return make_quantised(optional("llama_cpp"), path, self.quantised) if self.quantised else path


@dataclass(slots=True)
class Sample:
    """One turn of a competitor.

    Attributes:
        ns: The time of each step, or of what counts as one.
        tokens: Tokens that a step gave or took in; 0 where that is not the point.
        latency_ns: The time of each call, where that is not the time of a step.
        bytes_read: What a step has to read at least, if the peer knows it and the plan does not.
        flops: What a step has to compute at least, likewise.
        more: Other numbers, by their names.
    """

    ns: list[int]
    tokens: int = 0
    latency_ns: list[int] = field(default_factory=list)
    bytes_read: int = 0
    flops: int = 0
    more: dict[str, float] = field(default_factory=dict)


class Peer:
    """A competitor. It implements only the methods that its entries use.

    The entries of a plan name its methods. One that measures returns a Sample. One that prepares may return
    the first tokens of the first sequence, to compare competitors by.
    """

    def versions(self) -> dict[str, str]:
        """Names and versions of the libraries and kernels."""
        return {}

    def prepare_prefill(self, batch: int, prompt_tokens: int) -> None:
        """Prepares sequences for `batch` prompts."""

    def release(self) -> None:
        """Releases the prepared sequences."""

    def memory(self) -> dict[str, int]:
        """Peak memory in bytes, by process."""
        return {"": peak_memory_bytes("self")}

    def held(self) -> dict[str, int]:
        """The file of quantised weights and the KV in bytes, by the names of `memory`; empty: not known."""
        return {}

    def close(self) -> None:
        """Ends the processes that the peer started."""


def prompts(shape_vocab: int, batch: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, the same for all competitors with the same arguments."""
    random = np.random.default_rng([seed, batch, tokens])
    found: list[list[int]] = random.integers(0, shape_vocab, (batch, tokens)).tolist()
    return found


def timed(work: Callable[[], object]) -> int:
    """The time of a call in ns."""
    began_ns = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - began_ns


def timed_steps(step: Callable[[], object], steps: int) -> list[int]:
    """The time of each of `steps` calls in ns, after some warm-up calls."""
    return [timed(step) for _ in range(SETTLING_STEPS + steps)][SETTLING_STEPS:]


def optional(module: str) -> Any:
    """A module of the extra `bench`. Raises Unavailable if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{module} is not installed") from error


def peak_memory_bytes(pid: int | str) -> int:
    """The peak resident memory of a process, from /proc; 0 if there is no such file."""
    status = Path(f"/proc/{pid}/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
