"""What the oracle knows of a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.v1 import types_pb2

from service.caches.requests import Append


@dataclass(slots=True)
class Applied:
    """The last append of a cache, if nothing came after it."""

    base: int
    append: Append
    kept: int


@dataclass(slots=True)
class Cache:
    """The truth about one cache."""

    cache_id: str
    seed: int
    lease_s: float
    tokens: list[int] = field(default_factory=list)
    prompt_len: int = 0
    epoch: int = 0
    request_id: str = ""
    last: Applied | None = None
    # Its KV is gone, and the gateway knows.
    lost: bool = False
    # Until when the last handle that a caller got promises that the cache lives.
    promised_s: float = 0.0

    def is_repeat(self, append: Append, position: int | None) -> bool:
        """Whether an append says what the last one said."""
        last = self.last
        return (
            last is not None
            and position == last.base
            and list(append.token_ids) == list(last.append.token_ids)
            and append.accept == last.append.accept
        )

    def is_remembered(self, append: Append) -> bool:
        """Whether the last append's answer must have been kept for one that repeats it."""
        last = self.last
        return (
            last is not None
            and append.rows == last.append.rows
            and append.output == last.append.output
            and not (isinstance(append.output, types_pb2.OutputOptions) and append.output.logits)
        )
