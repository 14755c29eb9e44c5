"""The API's enums as words: "greedy" for VERIFY_ACCEPT_GREEDY."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

Priority: TypeAlias = Literal["low", "normal", "high"]
# Which drafts `verify` keeps. "all": the caller truncates the cache.
Accept: TypeAlias = Literal["all", "greedy", "sampled", "speculative"]
Policy: TypeAlias = Literal["order", "local_first", "cheapest"]
Cause: TypeAlias = Literal["manual", "cuda_context_poisoned", "remote_auth_failure", "remote_config_change"]
FinishReason: TypeAlias = Literal[
    "stop", "length", "content_filter", "tool_calls", "error", "cancelled", "unlikely", "uncertain"
]


def number_of(parameter: str, enum: EnumTypeWrapper, word: str | None) -> Any:
    """The value of a word; None for None. Raises ValueError, which names the parameter."""
    if word is None:
        return None
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
