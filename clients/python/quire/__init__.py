"""Python client of Quire, an LLM server whose API is the forward pass: you run the decoding loop.

    from quire import Client

    with Client("127.0.0.1:50051") as client, client.prefill(prompt) as cache:
        token = cache.output.token_id
        while token not in stop:
            token = cache.decode(token).token_id

The server generates whole texts: `client.generate("Once", max_tokens=20)`, or piece by piece
`for chunk in client.execute("Once", max_tokens=20): print(chunk.text)`.

`AsyncClient` has the same methods with `await`. `client.session()` has the same operations, multiplexed on
one stream. The generated stubs are in `quire.v1`. Importing them does not load the client, because this
module imports each name when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire._aio_caches import AsyncCache as AsyncCache
    from quire._aio_caches import AsyncGeneration as AsyncGeneration
    from quire._batches import PrefillItem as PrefillItem
    from quire._batches import Scored as Scored
    from quire._batches import ScoreItem as ScoreItem
    from quire._batches import checked as checked
    from quire._caches import Cache as Cache
    from quire._caches import Generation as Generation
    from quire._calls import CallOptions as CallOptions
    from quire._calls import Verified as Verified
    from quire._chunks import Answer as Answer
    from quire._chunks import Chunk as Chunk
    from quire._connection import Tls as Tls
    from quire._enums import Accept as Accept
    from quire._enums import Cause as Cause
    from quire._enums import FinishReason as FinishReason
    from quire._enums import Policy as Policy
    from quire._enums import Priority as Priority
    from quire._items import Prompt as Prompt
    from quire._items import TextSettings as TextSettings
    from quire._items import item as item
    from quire._masks import token_mask as token_mask
    from quire._options import draft_from_top as draft_from_top
    from quire._options import draft_probabilities as draft_probabilities
    from quire._options import output_options as output_options
    from quire._options import verify_rows as verify_rows
    from quire._tensors import expert_ids as expert_ids
    from quire._tensors import floats as floats
    from quire.aio import AsyncClient as AsyncClient
    from quire.aio import AsyncSession as AsyncSession
    from quire.client import Client as Client
    from quire.client import Session as Session
    from quire.errors import Aborted as Aborted
    from quire.errors import AdapterNotFound as AdapterNotFound
    from quire.errors import CacheNotFound as CacheNotFound
    from quire.errors import Cancelled as Cancelled
    from quire.errors import DeadlineExceeded as DeadlineExceeded
    from quire.errors import InternalError as InternalError
    from quire.errors import InvalidRequest as InvalidRequest
    from quire.errors import NotFound as NotFound
    from quire.errors import OutOfRange as OutOfRange
    from quire.errors import PermissionDenied as PermissionDenied
    from quire.errors import PositionMismatch as PositionMismatch
    from quire.errors import PreconditionFailed as PreconditionFailed
    from quire.errors import QuireError as QuireError
    from quire.errors import ResourceExhausted as ResourceExhausted
    from quire.errors import RuntimeNotFound as RuntimeNotFound
    from quire.errors import SessionEnded as SessionEnded
    from quire.errors import Unauthenticated as Unauthenticated
    from quire.errors import Unavailable as Unavailable
    from quire.executions import AsyncExecution as AsyncExecution
    from quire.executions import Execution as Execution
    from quire.v1.types_pb2 import DraftProbabilities as DraftProbabilities
    from quire.v1.types_pb2 import OutputOptions as OutputOptions
    from quire.v1.types_pb2 import SampledToken as SampledToken
    from quire.v1.types_pb2 import SamplingParams as SamplingParams
    from quire.v1.types_pb2 import StepOutput as StepOutput
    from quire.v1.types_pb2 import TokenMask as TokenMask
    from quire.v1.types_pb2 import VerifyRow as VerifyRow

_EXPORTS = {
    "quire._connection": ("Tls",),
    "quire._calls": ("CallOptions", "Verified"),
    "quire._chunks": ("Answer", "Chunk"),
    "quire._enums": ("Accept", "Cause", "FinishReason", "Policy", "Priority"),
    "quire._items": ("Prompt", "TextSettings", "item"),
    "quire._batches": ("PrefillItem", "ScoreItem", "Scored", "checked"),
    "quire._masks": ("token_mask",),
    "quire._options": ("draft_from_top", "draft_probabilities", "output_options", "verify_rows"),
    "quire._tensors": ("expert_ids", "floats"),
    "quire.executions": ("AsyncExecution", "Execution"),
    "quire._aio_caches": ("AsyncCache", "AsyncGeneration"),
    "quire._caches": ("Cache", "Generation"),
    "quire.aio": ("AsyncClient", "AsyncSession"),
    "quire.client": ("Client", "Session"),
    "quire.errors": (
        "Aborted",
        "AdapterNotFound",
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

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - the imports above tell type checkers


def __dir__() -> list[str]:
    return __all__


# To type checkers it would say that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module 'quire' has no attribute {name!r}")
        return getattr(importlib.import_module(module), name)
