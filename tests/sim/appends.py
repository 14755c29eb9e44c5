"""Appends with options as the API writes them, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from service.api.append_codec import serialized
from service.caches.requests import Append, AppendKind
from workers.common import worker_pb2


def append(
    kind: AppendKind, cache_id: str, token_ids: Sequence[int], position: int | None = None, **fields: Any
) -> Append:
    """An append with the last row's output. `fields`: of an Append, and of its options."""
    options = {name: fields.pop(name) for name in ("rows", "output", "accept", "parents") if name in fields}
    plain = Append(kind, cache_id, list(token_ids), position, **fields)
    return with_options(plain, **{"rows": 1} | options)


def with_options(append: Append, **changes: Any) -> Append:
    """The same append with some options changed."""
    options = options_of(append)
    for name in changes:
        options.ClearField(name)
    options.MergeFrom(worker_pb2.ForwardOptions(**changes))
    return dataclasses.replace(
        append,
        options=serialized(options),
        accept=options.accept,
        parents=tuple(options.parents),
        rows=options.rows,
        keeps_answer=not options.output.logits,
    )


def options_of(append: Append) -> worker_pb2.ForwardOptions:
    """What an append asks for."""
    return worker_pb2.ForwardOptions.FromString(append.options)


def run_of(append: Append, token_ids: Sequence[int]) -> Append:
    """A decode with those that were appended and answered with it, as one append of them all."""
    rows = options_of(append).rows + len(token_ids) - len(append.token_ids)
    return with_options(dataclasses.replace(append, token_ids=token_ids, prelaunch=0), rows=rows)
