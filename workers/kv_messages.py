"""What workers are told, and say, of KV that they have and others want: plain data, as in `operations`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """The gateway's state of a sequence: its length, and the digest of tokens and salt (`adoption`)."""

    sequence: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class KvPages:
    """The KV of the tokens `first` to `end` of a sequence, and all that it depends on.

    Attributes:
        first, end: `first` is a multiple of the page size.
        digest: That of the sequence's tokens up to `end`; see `adoption.token_digest`.
        salt: The salt with which the sequence was made.
        fingerprint: That of the model.
        layout: See `KvTensors.layout`.
        data: Whole pages in this layout.
    """

    first: int
    end: int
    digest: bytes
    salt: bytes
    fingerprint: str
    layout: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ExportKv:
    """Return the KV of some tokens of a sequence. `salt`: that of its cache."""

    op_id: int
    sequence: int
    first: int
    end: int
    salt: bytes


@dataclass(frozen=True, slots=True)
class ImportKv:
    """Append tokens to a sequence with KV that another worker has exported."""

    op_id: int
    sequence: int
    token_ids: Sequence[int]
    salt: bytes
    pages: KvPages


@dataclass(frozen=True, slots=True)
class Exported:
    """The answer to ExportKv."""

    op_id: int
    pages: KvPages
