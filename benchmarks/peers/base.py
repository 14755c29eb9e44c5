"""What a competitor is: a program of its own that measures itself when it is told to.

Each runs in its own process (`host.py`), so that thread pools, interpreters and peaks of memory are its own.
Methods are called by name with JSON arguments, and answer JSON.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import SHAPES, Shape
from benchmarks.weights import make_model

# Steps before the measured ones of a turn, while the caches of the CPU still hold another competitor's data.
SETTLING_STEPS = 1


class Unavailable(Exception):
    """The competitor cannot take part, and that is no fault: it is not installed, or not built yet."""


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """What every competitor is started with.

    Attributes:
        name: What the plan calls it.
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
    rehearsal: bool

    @property
    def shape(self) -> Shape:
        """Of the model that is measured."""
        return SHAPES[self.shape_name]

    def model_dir(self) -> Path:
        """Its Hugging Face directory, made if it is not there."""
        return make_model(self.shape, self.cache)


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
    """A competitor; what it does not do, it is not asked for.

    The entries of a plan name its methods. One that measures returns a Sample, or Samples by the entry's
    parts. One that prepares may return the first tokens of the first sequence, to compare competitors by.
    """

    def versions(self) -> dict[str, str]:
        """Names and versions of what does the work."""
        return {}

    def prepare_prefill(self, batch: int, prompt_tokens: int) -> None:
        """Makes room for `batch` prompts."""

    def release(self) -> None:
        """Forgets what was prepared."""

    def memory(self) -> dict[str, int]:
        """Peak memory in bytes, by process."""
        return {"": peak_memory_bytes("self")}

    def close(self) -> None:
        """Ends what the peer has started."""


def prompts(shape_vocab: int, batch: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Random token ids; those of the same arguments are alike for all competitors."""
    random = np.random.default_rng([seed, batch, tokens])
    found: list[list[int]] = random.integers(0, shape_vocab, (batch, tokens)).tolist()
    return found


def timed(work: Callable[[], object]) -> int:
    """The time of a call in ns."""
    began_ns = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - began_ns


def timed_steps(step: Callable[[], object], steps: int) -> list[int]:
    """The time of each of `steps` calls in ns, after some that settle."""
    return [timed(step) for _ in range(SETTLING_STEPS + steps)][SETTLING_STEPS:]


def optional(module: str) -> Any:
    """A module of the extra `bench`. Raises Unavailable if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{module} is not installed") from error


def peak_memory_bytes(pid: int | str) -> int:
    """The most memory that a process has had resident, from /proc; 0 where there is no such file."""
    status = Path(f"/proc/{pid}/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
