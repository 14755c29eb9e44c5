"""KV that moves between workers: what a worker exports, and what it has to see before it imports.

The gateway passes pages on without reading them. A worker uses them only if they are of its model, in its
layout, and of the same tokens under the same salt, which contains the version of the adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workers.adoption import token_digest
from workers.executors.engine import Engine
from workers.executors.errors import ExecutorError, KvMissing
from workers.kv.sequence import KvSequence
from workers.kv_messages import Exported, ExportKv, ImportKv, KvPages
from workers.operations import Done
from workers.runners.base import raise_if_lost


def export_kv(engine: Engine, command: ExportKv, fingerprint: str) -> Exported:
    """Raises KvMissing or ExecutorError."""
    _require_whole_kv(engine)
    sequence, salt, data = _read_kv(engine, command.sequence, command.first, command.end)
    if salt != command.salt:
        raise ExecutorError(f"sequence {command.sequence} has another salt")
    digest = token_digest(sequence.token_ids.as_array()[: command.end])
    pages = KvPages(command.first, command.end, digest, salt, fingerprint, engine.kv.layout, data)
    return Exported(command.op_id, pages)


def import_kv(engine: Engine, command: ImportKv, fingerprint: str) -> Done:
    """Raises KvMissing, OutOfPages, or ExecutorError if the pages are not what the sequence needs."""
    _require_whole_kv(engine)
    pages, known = command.pages, engine.kv_table.get(command.sequence)
    held = np.array([], np.uint32) if known is None else known.token_ids.as_array()
    tokens = np.concatenate([held, np.array(command.token_ids, np.uint32)])
    if len(held) != pages.first:
        raise KvMissing(f"{len(held)} tokens of {pages.first}")
    expected = {
        "the model": (pages.fingerprint, fingerprint),
        "the layout": (pages.layout, engine.kv.layout),
        "the number of tokens": (pages.end - pages.first, len(command.token_ids)),
        "the digest of the tokens": (pages.digest, token_digest(tokens)),
        "the salt": (pages.salt, command.salt),
    }
    for what, (theirs, ours) in expected.items():
        if theirs != ours:
            raise ExecutorError(f"{what} of the KV is {theirs!r}, not {ours!r}")
    _append_kv(engine, command.sequence, pages.salt, command.token_ids, pages.data)
    return Done(command.op_id)


def _read_kv(engine: Engine, sequence: int, first: int, end: int) -> tuple[KvSequence, bytes, bytes]:
    """The KV of tokens of a sequence as whole pages; returns the sequence, its salt, and their bytes."""
    known, size = engine.kv_table.get(sequence), engine.kv.page_size
    if known is None:
        raise KvMissing(f"sequence {sequence} is not known")
    if len(known) < end:
        raise KvMissing(f"{len(known)} tokens of {end}")
    if first % size or first >= end:
        raise ExecutorError(f"tokens from {first} to {end} are not whole pages of {size}")
    data = engine.kv.read_pages(known.pages[first // size : -(-end // size)])
    return known, engine.kv_table.salt_of(known), data


def _append_kv(engine: Engine, sequence: int, salt: bytes, token_ids: Sequence[int], data: bytes) -> None:
    """Append tokens whose KV is given as whole pages. Creates an unknown sequence.

    Pages that are there already are shared. Raises OutOfPages, or ValueError for data of another size or a
    sequence that ends within a page; then nothing has changed.
    """
    table, size = engine.kv_table, engine.kv.page_size
    known = table.get(sequence)
    if known is None:
        known = table.create(sequence, salt)
    before = len(known)
    if before % size:
        raise ValueError(f"sequence {sequence}: {before} tokens are not whole pages of {size}")
    try:
        reused = table.match_prefix(known, token_ids, len(token_ids))
        table.reserve(known, len(token_ids) - reused)
        engine.kv.write_pages(known.pages[len(known) // size :], data, reused // size)
        table.append(known, token_ids[reused:])
    except Exception as error:
        table.truncate(known, before)
        if not before:
            table.release(sequence)
        raise_if_lost(error)
        raise


def _require_whole_kv(engine: Engine) -> None:
    """Raises ExecutorError if this process has a part of the heads, and other ranks have the others."""
    if engine.kv.others is not None:
        raise ExecutorError("KV of a model that is split over ranks is not copied")
