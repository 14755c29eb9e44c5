"""What a competitor is: a program of its own that prefills and decodes when it is told to.

Each runs in its own process (`host.py`), so that thread pools, interpreters and peaks of memory are its own.
Methods are called by name with JSON arguments, and answer JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

# Steps before the measured ones of a turn, while the caches of the CPU still hold another competitor's data.
SETTLING_STEPS = 1


class Unavailable(Exception):
    """The competitor cannot take part, and that is no fault: it is not installed, or not built yet."""


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """What every competitor is started with."""

    shape: str
    model_dir: Path
    threads: int
    # Pages of 16 tokens for Quire's executors, the same in process and behind the gateway.
    kv_pages: int


@dataclass(slots=True)
class Sample:
    """One turn of a competitor.

    Attributes:
        ns: The time of each step, or of what counts as one.
        tokens: Tokens that a step gave or took in.
        latency_ns: The time of each call, where that is not the time of a step.
        items_per_step: Mean size of the worker's batches; 0 where there is no worker.
    """

    ns: list[int]
    tokens: int
    latency_ns: list[int] = field(default_factory=list)
    items_per_step: float = 0.0


class Peer:
    """A competitor; what it does not do, it is not asked for.

    A turn of decoding leaves the sequences as `prepare_decode` did.
    """

    def versions(self) -> dict[str, str]:
        """Names and versions of what does the work."""
        return {}

    def prepare_decode(self, batch: int, context_tokens: int) -> list[int]:
        """Fills `batch` sequences. Returns the first tokens of the first one, to compare competitors by."""
        raise NotImplementedError

    def decode(self, steps: int) -> Sample:
        """Decodes greedily, `steps` times one token for every sequence."""
        raise NotImplementedError

    def prepare_prefill(self, batch: int, prompt_tokens: int) -> None:
        """Makes room for `batch` prompts."""

    def prefill(self, batch: int, prompt_tokens: int, seed: int) -> Sample:
        """Prefills prompts drawn from `seed`, and forgets them."""
        raise NotImplementedError

    def release(self) -> None:
        """Forgets the sequences."""

    def memory(self) -> dict[str, int]:
        """Peak resident memory in bytes, by process."""
        return {"": peak_memory_bytes("self")}

    def close(self) -> None:
        """Ends what the peer has started."""


def prompts(shape_vocab: int, batch: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Random token ids; those of the same arguments are alike for all competitors."""
    random = np.random.default_rng([seed, batch, tokens])
    found: list[list[int]] = random.integers(0, shape_vocab, (batch, tokens)).tolist()
    return found


def timed_steps(step: Callable[[], object], steps: int) -> list[int]:
    """The time of each of `steps` calls in ns, after some that settle."""
    for _ in range(SETTLING_STEPS):
        step()
    found = []
    for _ in range(steps):
        began_ns = time.perf_counter_ns()
        step()
        found.append(time.perf_counter_ns() - began_ns)
    return found


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


def end_descendants(pid: int) -> None:
    """Kills what a process has started and not ended itself."""
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
