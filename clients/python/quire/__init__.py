"""Python client of Quire, a token-level LLM executor: you own the decoding loop, it owns model and KV.

    from quire import Client

    with Client("127.0.0.1:50051") as client, client.prefill(prompt) as cache:
        token = cache.output.token_id
        while token not in stop:
            token = cache.decode(token).token_id

`AsyncClient` is the same with `await`; `client.session()` has the same operations, many at once on a stream.
The generated stubs are in `quire.v1`; importing them loads none of the client, so what stands here is loaded
when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.aio import AsyncCache, AsyncClient, AsyncSession
    from quire.client import Cache, Client, Session
    from quire.errors import (
        CacheNotFound,
        Cancelled,
        DeadlineExceeded,
        InternalError,
        InvalidRequest,
        OutOfRange,
        PermissionDenied,
        PositionMismatch,
        PreconditionFailed,
        QuireError,
        ResourceExhausted,
        SessionEnded,
        Unauthenticated,
        Unavailable,
    )
    from quire.v1.types_pb2 import (
        PRIORITY_HIGH,
        PRIORITY_LOW,
        PRIORITY_NORMAL,
        OutputOptions,
        SamplingParams,
        StepOutput,
        TokenMask,
    )

_HOME = {
    "quire.aio": ("AsyncCache", "AsyncClient", "AsyncSession"),
    "quire.client": ("Cache", "Client", "Session"),
    "quire.errors": (
        "CacheNotFound",
        "Cancelled",
        "DeadlineExceeded",
        "InternalError",
        "InvalidRequest",
        "OutOfRange",
        "PermissionDenied",
        "PositionMismatch",
        "PreconditionFailed",
        "QuireError",
        "ResourceExhausted",
        "SessionEnded",
        "Unauthenticated",
        "Unavailable",
    ),
    "quire.v1.types_pb2": (
        "PRIORITY_HIGH",
        "PRIORITY_LOW",
        "PRIORITY_NORMAL",
        "OutputOptions",
        "SamplingParams",
        "StepOutput",
        "TokenMask",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "PRIORITY_HIGH",
    "PRIORITY_LOW",
    "PRIORITY_NORMAL",
    "AsyncCache",
    "AsyncClient",
    "AsyncSession",
    "Cache",
    "CacheNotFound",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "InternalError",
    "InvalidRequest",
    "OutOfRange",
    "OutputOptions",
    "PermissionDenied",
    "PositionMismatch",
    "PreconditionFailed",
    "QuireError",
    "ResourceExhausted",
    "SamplingParams",
    "Session",
    "SessionEnded",
    "StepOutput",
    "TokenMask",
    "Unauthenticated",
    "Unavailable",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
