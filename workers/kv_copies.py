"""KV that moves between workers: what a worker exports, and what it has to see before it imports.

The gateway passes pages on without reading them. A worker uses them only if they are of its model, in its
layout, and of the same tokens under the same salt, which contains the version of the adapter.
"""

from __future__ import annotations

import numpy as np

from workers.adoption import token_digest
from workers.executors.engine import Engine
from workers.executors.errors import ExecutorError, KvMissing
from workers.kv_messages import Exported, ExportKv, ImportKv, KvPages
from workers.operations import Done


def export_kv(engine: Engine, command: ExportKv, fingerprint: str) -> Exported:
    """Raises KvMissing or ExecutorError."""
    _require_whole_kv(engine)
    sequence, salt, data = engine.read_kv(command.sequence, command.first, command.end)
    if salt != command.salt:
        raise ExecutorError(f"sequence {command.sequence} has another salt")
    digest = token_digest(sequence.token_ids.as_array()[: command.end])
    pages = KvPages(command.first, command.end, digest, salt, fingerprint, engine.kv.layout, data)
    return Exported(command.op_id, pages)


def import_kv(engine: Engine, command: ImportKv, fingerprint: str) -> Done:
    """Raises KvMissing, OutOfPages, or ExecutorError if the pages are not what the sequence needs."""
    _require_whole_kv(engine)
    pages, held = command.pages, engine.tokens_of(command.sequence)
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
    engine.append_kv(command.sequence, pages.salt, command.token_ids, pages.data)
    return Done(command.op_id)


def _require_whole_kv(engine: Engine) -> None:
    """Raises ExecutorError if this process has a part of the heads, and other ranks have the others."""
    if engine.kv.others is not None:
        raise ExecutorError("KV of a model that is split over ranks is not copied")
