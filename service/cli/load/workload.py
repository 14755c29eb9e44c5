"""What requests ask for: lengths that are drawn, or read from a trace, and prompts of such lengths.

A request is a pure function of the seed and its number, so that processes share a workload without a word.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class BadWorkload(Exception):
    """What was asked for cannot be done; the message says which part of it, and why."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers to draw from: those of a range, or of a list, all equally likely."""

    low: int
    high: int
    choices: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Reads `128`, `64-512` or `64,128,1024`. Raises ValueError."""
        if "," in text:
            choices = tuple(int(part) for part in text.split(","))
            found = cls(min(choices), max(choices), choices)
        else:
            low, dash, high = text.partition("-")
            found = cls(int(low), int(high if dash else low))
        if not 0 <= found.low <= found.high:
            raise ValueError(text)
        return found

    def draw(self, draws: random.Random) -> int:
        return draws.choice(self.choices) if self.choices else draws.randint(self.low, self.high)

    def __str__(self) -> str:
        if self.choices:
            return ",".join(map(str, self.choices))
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One line of a trace. `prompt_tokens` includes those of the shared prefix."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    # Requests with the same one begin alike.
    shared_prefix: str | None = None
    shared_prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to run; `Workload.prompt` makes its tokens."""

    index: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix: str | None
    shared_prefix_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Where requests come from: a trace, over and over, or else the lengths."""

    seed: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix_tokens: Lengths = Lengths(0, 0)
    shared_prefixes: int = 1
    trace: tuple[TraceLine, ...] = ()

    def request(self, index: int) -> Request:
        """The request of that number."""
        if self.trace:
            line = self.trace[index % len(self.trace)]
            wanted, output = line.prompt_tokens, line.output_tokens
            prefix, prefix_tokens = line.shared_prefix, line.shared_prefix_tokens
        else:
            draws = random.Random(f"lengths {self.seed} {index}")
            wanted, output = self.prompt_tokens.draw(draws), self.output_tokens.draw(draws)
            prefix_tokens = self.shared_prefix_tokens.draw(draws)
            prefix = str(draws.randrange(self.shared_prefixes)) if prefix_tokens else None
        # The last token is a request's own, as a prompt that is known as a whole is no prompt to compute.
        return Request(index, wanted, output, prefix, min(prefix_tokens, wanted - 1))

    def prompt(self, request: Request, vocab_size: int, run_id: str = "") -> list[int]:
        """Its token ids, of `vocab_size` different ones. A shared prefix is the same for all who share it.

        With another `run_id` they are others: a server that still knows the prompts of an earlier run does
        not know these.
        """
        seed = f"{self.seed} {run_id}"
        shared = 0 if request.shared_prefix is None else request.shared_prefix_tokens
        prefix = _tokens(f"prefix {seed} {request.shared_prefix}", shared, vocab_size)
        own = request.prompt_tokens - len(prefix)
        return prefix + _tokens(f"prompt {seed} {request.index}", own, vocab_size)

    @property
    def longest_tokens(self) -> int:
        """Of prompt and output together, at most."""
        if self.trace:
            return max(line.prompt_tokens + line.output_tokens for line in self.trace)
        return self.prompt_tokens.high + self.output_tokens.high


def _tokens(seed: str, count: int, vocab_size: int) -> list[int]:
    draw = random.Random(seed).random
    return [int(draw() * vocab_size) for _ in range(count)]


def read_trace(path: Path, default_prefix_tokens: int) -> tuple[TraceLine, ...]:
    """The requests of a file of JSON lines, sorted by time. Raises OSError, BadWorkload with a line."""
    lines = []
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                try:
                    lines.append(_trace_line(json.loads(text), default_prefix_tokens))
                except (ValueError, BadWorkload) as error:
                    raise BadWorkload(f"{path}:{number}: {error}") from None
    if not lines:
        raise BadWorkload(f"{path}: no requests in it")
    return tuple(sorted(lines, key=lambda line: line.at_s))


_KNOWN = {"at_s", "prompt_tokens", "output_tokens", "shared_prefix", "shared_prefix_tokens"}


def _trace_line(found: Any, default_prefix_tokens: int) -> TraceLine:
    if not isinstance(found, dict):
        raise BadWorkload("must be an object")
    if unknown := sorted(found.keys() - _KNOWN):
        raise BadWorkload(f"{unknown[0]} is not known")
    prefix = found.get("shared_prefix")
    prefix_tokens = default_prefix_tokens if prefix is not None else 0
    return TraceLine(
        at_s=_number(found, "at_s", float, 0),
        prompt_tokens=_number(found, "prompt_tokens", int, 1),
        output_tokens=_number(found, "output_tokens", int, 1),
        shared_prefix=None if prefix is None else str(prefix),
        shared_prefix_tokens=_number(
            {"shared_prefix_tokens": prefix_tokens} | found, "shared_prefix_tokens", int, 0
        ),
    )


def _number(found: dict[str, Any], name: str, kind: Callable[[Any], Any], least: float) -> Any:
    value = found.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not least <= value < float("inf") or kind(value) != value:
        raise BadWorkload(
            f"{name} must be a{' whole' if kind is int else ''} number from {least}, not {value!r}"
        )
    return kind(value)
