"""Translates a provider's errors into this server's reasons and texts.

The text of a provider's error may contain prompts, other callers' names or credentials. So only error codes
that are known here are read and logged. Callers get this server's text, and a reason that they can act on.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping

from service.errors import InternalError, ProviderFailure
from service.logging import get_logger
from service.outbound import proxy_of

_log = get_logger(__name__)
# Providers may send delays that do not fit into a Duration.
_LONGEST_WAIT_S = 86_400.0

_TEXTS = {
    "RATE_LIMITED": "the provider takes no more requests for now",
    "CONTENT_FILTERED": "the provider does not answer such contents",
    "CONTEXT_LENGTH_EXCEEDED": "prompt and answer would be longer than the provider's model allows",
    "BAD_REQUEST": "the provider did not accept the request",
    "UNAUTHORIZED": "the provider did not accept this server's credentials",
    "FORBIDDEN": "the provider does not let this server's account do it, or has no such address or model",
    "NETWORK_ERROR": "the connection to the provider failed",
    "SERVER_ERROR": "the provider failed",
    "TIMEOUT": "the provider did not answer in time",
}
# Error codes and types of all dialects that are more specific than the HTTP status.
_SPECIFIC = {
    "context_length_exceeded": "CONTEXT_LENGTH_EXCEEDED",
    "content_filter": "CONTENT_FILTERED",
    "content_policy_violation": "CONTENT_FILTERED",
    "insufficient_quota": "FORBIDDEN",
    "billing_hard_limit_reached": "FORBIDDEN",
    "billing_error": "FORBIDDEN",
    "model_not_found": "FORBIDDEN",
}
# Error codes that are equivalent to a status, for errors in the middle of a stream.
_GENERIC = {
    "invalid_request_error": "BAD_REQUEST",
    "not_found_error": "FORBIDDEN",
    "request_too_large": "BAD_REQUEST",
    "authentication_error": "UNAUTHORIZED",
    "invalid_api_key": "UNAUTHORIZED",
    "permission_error": "FORBIDDEN",
    "rate_limit_error": "RATE_LIMITED",
    "rate_limit_exceeded": "RATE_LIMITED",
    "timeout_error": "TIMEOUT",
    "api_error": "SERVER_ERROR",
    "overloaded_error": "SERVER_ERROR",
    "server_error": "SERVER_ERROR",
}
_STATUSES = {
    401: "UNAUTHORIZED",
    402: "FORBIDDEN",
    403: "FORBIDDEN",
    # The configured address or model is wrong, not the item.
    404: "FORBIDDEN",
    405: "FORBIDDEN",
    410: "FORBIDDEN",
    408: "TIMEOUT",
    407: "NETWORK_ERROR",
    409: "SERVER_ERROR",
    425: "SERVER_ERROR",
    429: "RATE_LIMITED",
}
# Statuses that a proxy may answer itself, if there is no TLS to the provider.
_OF_PROXIES = frozenset({407, 502, 503, 504})
# Phrases for CONTEXT_LENGTH_EXCEEDED: not all providers have a code for it.
_TOO_LONG = ("context length", "context window", "context size", "prompt is too long", "too many tokens")


def failure(reason: str, text: str = "", retry_after_s: float | None = None) -> ProviderFailure:
    """A failure with the text for its reason, or with `text`, which must not be the provider's."""
    if retry_after_s is not None:
        retry_after_s = min(retry_after_s, _LONGEST_WAIT_S)
    return ProviderFailure(reason, text or _TEXTS[reason], retry_after_s=retry_after_s)


def unreachable(reason: str, url: str) -> ProviderFailure:
    """The failure if no response came from a URL."""
    return failure(reason, _TEXTS[reason] + _through(url))


def _through(url: str) -> str:
    """The end of an error text if a proxy is used: it names the setting, and not the proxy's address."""
    proxy = proxy_of(url) if url else None
    return "" if proxy is None else f", through the proxy that {proxy.variable} names"


def malformed() -> ProviderFailure:
    """The failure for a response that does not follow the dialect."""
    return failure("SERVER_ERROR", "the provider's answer cannot be understood")


def too_large(limit_bytes: int) -> ProviderFailure:
    """The failure for a response that is longer than allowed."""
    return failure("SERVER_ERROR", f"the provider's answer has more than {limit_bytes} bytes")


def internal(bug: Exception) -> InternalError:
    """Turns an unexpected exception into InternalError, and logs its traceback."""
    # Its text and chained exceptions are not logged: they may contain credentials.
    places = "".join(traceback.format_tb(bug.__traceback__))
    _log.error("a provider's call failed", kind=type(bug).__name__, places=places)
    return InternalError()


def http_error(
    runtime: str, status: int, body: bytes, retry_after_s: float | None, url: str = ""
) -> ProviderFailure:
    """The failure for a response from `url` whose status is not 200. `body` may be truncated."""
    try:
        error = json.loads(body)
    except (ValueError, RecursionError):
        error = None
    codes = _codes(error)
    reason = _STATUSES.get(status) or ("BAD_REQUEST" if status < 500 else "SERVER_ERROR")
    is_redirect = 300 <= status < 400
    if is_redirect:
        reason = "FORBIDDEN"
    elif status < 500:
        reason = next((_SPECIFIC[code] for code in codes if code in _SPECIFIC), reason)
    if reason == "BAD_REQUEST" and any(text in body.lower().decode(errors="replace") for text in _TOO_LONG):
        reason = "CONTEXT_LENGTH_EXCEEDED"
    _log.debug("a provider refused", runtime=runtime, status=status, reason=reason, code=" ".join(codes))
    if is_redirect:
        return failure(reason, "the provider wants another address to be asked, which is not done")
    maybe_of_proxy = status in _OF_PROXIES and url.startswith("http:")
    text = _TEXTS[reason] + _through(url) if maybe_of_proxy else ""
    return failure(reason, text, retry_after_s=retry_after_s)


def stream_error(runtime: str, error: object) -> ProviderFailure:
    """The failure for an error in the middle of a stream."""
    codes = _codes(error)
    known = _SPECIFIC | _GENERIC
    reason = next((known[code] for code in codes), "SERVER_ERROR")
    _log.debug("a provider broke off", runtime=runtime, reason=reason, code=" ".join(codes))
    return failure(reason)


def _codes(body: object) -> list[str]:
    """The known codes and types in an error body; specific ones first."""
    if not isinstance(body, Mapping):
        return []
    inner = body.get("error")
    error = inner if isinstance(inner, Mapping) else body
    found = [error.get("code"), error.get("type")]
    codes = [code for code in found if isinstance(code, str) and code in _SPECIFIC | _GENERIC]
    return sorted(codes, key=lambda code: code not in _SPECIFIC)
