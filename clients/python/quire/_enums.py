"""The API's enums as words: "greedy" for VERIFY_ACCEPT_GREEDY."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from quire.v1 import admin_pb2, runner_pb2, types_pb2

Priority: TypeAlias = Literal["low", "normal", "high"]
# Which drafts `verify` keeps. "all": the caller truncates the cache.
Accept: TypeAlias = Literal["all", "greedy", "sampled", "speculative"]
Policy: TypeAlias = Literal["order", "local_first", "cheapest"]
Cause: TypeAlias = Literal["manual", "cuda_context_poisoned", "remote_auth_failure", "remote_config_change"]
FinishReason: TypeAlias = Literal[
    "stop", "length", "content_filter", "tool_calls", "error", "cancelled", "unlikely", "uncertain"
]


def number_of(parameter: str, enum: EnumTypeWrapper, word: str) -> Any:
    """The value of a word. Raises ValueError."""
    prefix = _prefix(enum)
    words = {name.removeprefix(prefix).lower(): value for name, value in enum.items() if value}
    if word not in words:
        raise ValueError(f"{parameter} is one of {', '.join(words)}, not {word!r}")
    return words[word]


def name_of(enum: EnumTypeWrapper, number: int) -> Any:
    """The word of a value. None: it is unspecified. A value of a later version of the API is its number."""
    if not number:
        return None
    if number not in enum.values():
        return str(number)
    return enum.Name(number).removeprefix(_prefix(enum)).lower()


def _prefix(enum: EnumTypeWrapper) -> str:
    """What the names of its values begin with."""
    return enum.Name(0).removesuffix("UNSPECIFIED")


def priority_of(word: Priority | None) -> types_pb2.Priority:
    """None: unspecified. Raises ValueError."""
    if word is None:
        return types_pb2.PRIORITY_UNSPECIFIED
    priority: types_pb2.Priority = number_of("priority", types_pb2.Priority, word)
    return priority


def accept_of(word: Accept) -> types_pb2.VerifyAccept:
    """Raises ValueError."""
    accept: types_pb2.VerifyAccept = number_of("accept", types_pb2.VerifyAccept, word)
    return accept


def policy_of(word: Policy | None) -> runner_pb2.RoutingPolicy | None:
    """None: unset. Raises ValueError."""
    if word is None:
        return None
    policy: runner_pb2.RoutingPolicy = number_of("policy", runner_pb2.RoutingPolicy, word)
    return policy


def cause_of(word: Cause) -> admin_pb2.RebuildCause:
    """Raises ValueError."""
    cause: admin_pb2.RebuildCause = number_of("cause", admin_pb2.RebuildCause, word)
    return cause
