"""Errors in OpenAI's form: an HTTP status, headers, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from service.errors import QuireError

_STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
# Reasons for which HTTP has a more specific status.
_STATUS_OF_REASON = {
    "NO_SUCH_PATH": 404,
    "RESPONSE_NOT_FOUND": 404,
    "BAD_METHOD": 405,
    "MESSAGE_TIMEOUT": 408,
    "REQUEST_TOO_LARGE": 413,
    "BAD_CONTENT_TYPE": 415,
    "BAD_CONTENT_ENCODING": 415,
    "BAD_HOST": 421,
    # A provider refused this server's credentials: the caller cannot fix it.
    "UNAUTHORIZED": 502,
    "FORBIDDEN": 502,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# Reasons that have a code in OpenAI's API.
_CODES = {
    "RUNTIME_NOT_FOUND": "model_not_found",
    "SEQUENCE_TOO_LONG": "context_length_exceeded",
    "CONTEXT_LENGTH_EXCEEDED": "context_length_exceeded",
    "CONTENT_FILTERED": "content_filter",
    "NO_TOKEN": "invalid_api_key",
    "BAD_TOKEN": "invalid_api_key",
    "QUOTA": "insufficient_quota",
}


def http_status(error: QuireError) -> int:
    """The HTTP status of the response."""
    return _STATUS_OF_REASON.get(error.reason) or _STATUS.get(error.code, 500)


def headers(error: QuireError) -> dict[str, str]:
    """Headers of the response that tell when to retry, or not to retry."""
    fields = {}
    status = http_status(error)
    if status == 401:
        fields["www-authenticate"] = "Bearer"
    if error.reason == "BAD_CONTENT_ENCODING":
        fields["accept-encoding"] = "identity"
    if error.retry_after_s is not None:
        fields["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        fields["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    elif status in (429, 502):
        # Otherwise OpenAI's clients would retry by themselves.
        fields["x-should-retry"] = "false"
    return fields


def of_request(error: QuireError, param_of: Callable[[str], str]) -> QuireError:
    """The same error with the field of an item replaced by that of the request, from `param_of`."""
    return error.at(param_of(error.field)) if error.field else error


@contextlib.contextmanager
def of_prompt(index: int, count: int, param_of: Callable[[str], str]) -> Iterator[None]:
    """Adds to errors which of `count` prompts has failed, if there are several. `param_of`: the request's."""
    try:
        yield
    except QuireError as error:
        if count == 1:
            raise
        # The field is renamed before the prefix is added, since it cannot be renamed afterwards.
        raise of_request(error, param_of).after(f"prompt {index}: ") from None


def body(error: QuireError) -> dict[str, Any]:
    """The error object."""
    status = http_status(error)
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    param = "model" if error.reason == "RUNTIME_NOT_FOUND" else error.field or None
    code = _CODES.get(error.reason, error.reason.lower())
    return {"error": {"message": _message_of(error), "type": kind, "param": param, "code": code}}


def _message_of(error: QuireError) -> str:
    """The message, with the field unless it names it: clients print only the message."""
    is_named = error.field.rpartition(".")[2] in error.message
    return error.message if is_named else f"{error.field}: {error.message}"


_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def anthropic_body(error: QuireError) -> dict[str, Any]:
    """The error object of Anthropic's API."""
    status = http_status(error)
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": _message_of(error)}}
