"""Python client of Quire, a token-level LLM executor: you run the decoding loop, it holds model and KV.

    from quire import Client

    with Client("127.0.0.1:50051") as client, client.prefill(prompt) as cache:
        token = cache.output.token_id
        while token not in stop:
            token = cache.decode(token).token_id

The server generates whole texts: `for chunk in client.execute("Once", max_tokens=20): print(chunk.text)`.

`AsyncClient` has the same methods with `await`. `client.session()` has the same operations, multiplexed on
one stream. The generated stubs are in `quire.v1`. Importing them does not load the client, because this
module imports each name when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire._batches import PrefillItem, Scored, ScoreItem, checked
    from quire._connection import Tls
    from quire._items import item
    from quire._masks import token_mask
    from quire._options import draft_from_top, draft_probabilities, output_options, verify_rows
    from quire._tensors import floats
    from quire.aio import AsyncCache, AsyncClient, AsyncSession
    from quire.client import Cache, Client, Session
    from quire.errors import (
        Aborted,
        CacheNotFound,
        Cancelled,
        DeadlineExceeded,
        InternalError,
        InvalidRequest,
        NotFound,
        OutOfRange,
        PermissionDenied,
        PositionMismatch,
        PreconditionFailed,
        QuireError,
        ResourceExhausted,
        RuntimeNotFound,
        SessionEnded,
        Unauthenticated,
        Unavailable,
    )
    from quire.executions import AsyncExecution, Execution
    from quire.v1.types_pb2 import (
        PRIORITY_HIGH,
        PRIORITY_LOW,
        PRIORITY_NORMAL,
        VERIFY_ACCEPT_GREEDY,
        VERIFY_ACCEPT_SAMPLED,
        VERIFY_ACCEPT_SPECULATIVE,
        DraftProbabilities,
        OutputOptions,
        SampledToken,
        SamplingParams,
        StepOutput,
        TokenMask,
        VerifyRow,
    )

_EXPORTS = {
    "quire._connection": ("Tls",),
    "quire._items": ("item",),
    "quire._batches": ("PrefillItem", "ScoreItem", "Scored", "checked"),
    "quire._masks": ("token_mask",),
    "quire._options": ("draft_from_top", "draft_probabilities", "output_options", "verify_rows"),
    "quire._tensors": ("floats",),
    "quire.executions": ("AsyncExecution", "Execution"),
    "quire.aio": ("AsyncCache", "AsyncClient", "AsyncSession"),
    "quire.client": ("Cache", "Client", "Session"),
    "quire.errors": (
        "Aborted",
        "CacheNotFound",
        "Cancelled",
        "DeadlineExceeded",
        "InternalError",
        "InvalidRequest",
        "NotFound",
        "OutOfRange",
        "PermissionDenied",
        "PositionMismatch",
        "PreconditionFailed",
        "QuireError",
        "ResourceExhausted",
        "RuntimeNotFound",
        "SessionEnded",
        "Unauthenticated",
        "Unavailable",
    ),
    "quire.v1.types_pb2": (
        "PRIORITY_HIGH",
        "PRIORITY_LOW",
        "PRIORITY_NORMAL",
        "VERIFY_ACCEPT_GREEDY",
        "VERIFY_ACCEPT_SAMPLED",
        "VERIFY_ACCEPT_SPECULATIVE",
        "DraftProbabilities",
        "OutputOptions",
        "SampledToken",
        "SamplingParams",
        "StepOutput",
        "TokenMask",
        "VerifyRow",
    ),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "PRIORITY_HIGH",
    "PRIORITY_LOW",
    "PRIORITY_NORMAL",
    "VERIFY_ACCEPT_GREEDY",
    "VERIFY_ACCEPT_SAMPLED",
    "VERIFY_ACCEPT_SPECULATIVE",
    "Aborted",
    "AsyncCache",
    "AsyncClient",
    "AsyncExecution",
    "AsyncSession",
    "Cache",
    "CacheNotFound",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "DraftProbabilities",
    "Execution",
    "InternalError",
    "InvalidRequest",
    "NotFound",
    "OutOfRange",
    "OutputOptions",
    "PermissionDenied",
    "PositionMismatch",
    "PreconditionFailed",
    "PrefillItem",
    "QuireError",
    "ResourceExhausted",
    "RuntimeNotFound",
    "SampledToken",
    "SamplingParams",
    "ScoreItem",
    "Scored",
    "Session",
    "SessionEnded",
    "StepOutput",
    "Tls",
    "TokenMask",
    "Unauthenticated",
    "Unavailable",
    "VerifyRow",
    "checked",
    "draft_from_top",
    "draft_probabilities",
    "floats",
    "item",
    "output_options",
    "token_mask",
    "verify_rows",
]


def __dir__() -> list[str]:
    return __all__


# To type checkers it would say that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module 'quire' has no attribute {name!r}")
        return getattr(importlib.import_module(module), name)
