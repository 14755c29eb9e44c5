"""The requests of a load test: lengths that are drawn or read from a trace, and prompts of these lengths.

A request is a pure function of the seed and its index, so that processes need not communicate.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.terminal import WrongUsage


@dataclass(frozen=True, slots=True)
class Lengths:
    """A uniform distribution of integers over a range or a list."""

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
class Request:
    """One sequence to run; `Workload.prompt` makes its tokens. `prompt_tokens` includes the shared prefix."""

    # The start time in a trace.
    at_s: float
    prompt_tokens: int
    output_tokens: int
    # Requests with the same name share a prefix.
    shared_prefix: str | None = None
    shared_prefix_tokens: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """The source of requests: a trace, repeated, or the lengths."""

    seed: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix_tokens: Lengths = Lengths(0, 0)
    shared_prefixes: int = 1
    trace: tuple[Request, ...] = ()

    def request(self, index: int) -> Request:
        """The request with this index."""
        if self.trace:
            asked = self.trace[index % len(self.trace)]
        else:
            draws = random.Random(f"lengths {self.seed} {index}")
            prompt, output = self.prompt_tokens.draw(draws), self.output_tokens.draw(draws)
            shared = self.shared_prefix_tokens.draw(draws)
            asked = Request(
                0.0, prompt, output, str(draws.randrange(self.shared_prefixes)) if shared else None, shared
            )
        # The last token is never shared, because a fully cached prompt would not be computed.
        shared = min(asked.shared_prefix_tokens, asked.prompt_tokens - 1)
        return dataclasses.replace(asked, index=index, shared_prefix_tokens=shared)

    def prompt(self, request: Request, vocab_size: int, run_id: str = "") -> list[int]:
        """The token ids of a request, below `vocab_size`. Requests with the same prefix name share it.

        Another `run_id` gives other tokens, so that prompts of an earlier run in the server's prefix cache do
        not match.
        """
        seed = f"{self.seed} {run_id}"
        shared = 0 if request.shared_prefix is None else request.shared_prefix_tokens
        prefix = _tokens(f"prefix {seed} {request.shared_prefix}", shared, vocab_size)
        own = request.prompt_tokens - len(prefix)
        return prefix + _tokens(f"prompt {seed} {request.index}", own, vocab_size)

    @property
    def longest_tokens(self) -> int:
        """The maximum length of prompt and output together."""
        if self.trace:
            return max(line.prompt_tokens + line.output_tokens for line in self.trace)
        return self.prompt_tokens.high + self.output_tokens.high


def _tokens(seed: str, count: int, vocab_size: int) -> list[int]:
    draw = random.Random(seed).random
    return [int(draw() * vocab_size) for _ in range(count)]


def read_trace(path: Path, default_prefix_tokens: int) -> tuple[Request, ...]:
    """The requests of a JSON-lines file, sorted by time. Raises OSError, WrongUsage with the line number."""
    lines = []
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                try:
                    lines.append(_trace_line(json.loads(text), default_prefix_tokens))
                except (ValueError, WrongUsage) as error:
                    raise WrongUsage(f"{path}:{number}: {error}") from None
    if not lines:
        raise WrongUsage(f"{path}: no requests in it")
    return tuple(sorted(lines, key=lambda line: line.at_s))


_KNOWN = {"at_s", "prompt_tokens", "output_tokens", "shared_prefix", "shared_prefix_tokens"}


def _trace_line(found: Any, default_prefix_tokens: int) -> Request:
    if not isinstance(found, dict):
        raise WrongUsage("must be an object")
    if unknown := sorted(found.keys() - _KNOWN):
        raise WrongUsage(f"{unknown[0]} is not known")
    prefix = found.get("shared_prefix")
    prefix_tokens = default_prefix_tokens if prefix is not None else 0
    return Request(
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
        raise WrongUsage(
            f"{name} must be a{' whole' if kind is int else ''} number from {least}, not {value!r}"
        )
    return kind(value)
