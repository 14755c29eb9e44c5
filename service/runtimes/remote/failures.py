"""What went wrong with a provider, in words of our own.

What a provider says of an error may hold prompts, other callers' names or credentials. Of it, only codes that
are known here are looked at and logged; callers get our words, and a reason they can act on.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping

from service.errors import InternalError, ProviderFailure
from service.logging import get_logger

_log = get_logger(__name__)
# Providers may ask for times that no message can hold.
_LONGEST_WAIT_S = 86_400.0

_WORDS = {
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
# Codes and types of errors, of all dialects. Those that say more than the HTTP status they come with:
_TELLING = {
    "context_length_exceeded": "CONTEXT_LENGTH_EXCEEDED",
    "content_filter": "CONTENT_FILTERED",
    "content_policy_violation": "CONTENT_FILTERED",
    "insufficient_quota": "FORBIDDEN",
    "billing_hard_limit_reached": "FORBIDDEN",
    "billing_error": "FORBIDDEN",
    "model_not_found": "FORBIDDEN",
}
# And those that stand for one, where an error comes in the middle of a stream.
_PLAIN = {
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
    # The address or the model of the configuration: nothing is wrong with the item.
    404: "FORBIDDEN",
    405: "FORBIDDEN",
    410: "FORBIDDEN",
    408: "TIMEOUT",
    409: "SERVER_ERROR",
    425: "SERVER_ERROR",
    429: "RATE_LIMITED",
}
# Not all providers have a code for it.
_TOO_LONG = ("context length", "context window", "context size", "prompt is too long", "too many tokens")


def failure(reason: str, words: str = "", retry_after_s: float | None = None) -> ProviderFailure:
    """A failure in the words for its reason, or in better ones, which must be our own."""
    if retry_after_s is not None:
        retry_after_s = min(retry_after_s, _LONGEST_WAIT_S)
    return ProviderFailure(reason, words or _WORDS[reason], retry_after_s=retry_after_s)


class Unread(Exception):
    """What had come was not read in time: no fault of the provider's. Callers see TIMEOUT."""


def malformed() -> ProviderFailure:
    """The answer is not what the dialect says."""
    return failure("SERVER_ERROR", "the provider's answer cannot be understood")


def internal(bug: Exception) -> InternalError:
    """A bug of ours becomes what callers are told of it; the log has where it happened."""
    # Neither its text nor what it is chained to: both may hold credentials.
    places = "".join(traceback.format_tb(bug.__traceback__))
    _log.error("a provider's call failed", kind=type(bug).__name__, places=places)
    return InternalError()


def refusal(runtime: str, status: int, body: bytes, retry_after_s: float | None) -> ProviderFailure:
    """What an answer with another status than 200 means. `body` may be cut."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = None
    codes = _codes(said)
    reason = _STATUSES.get(status) or ("BAD_REQUEST" if status < 500 else "SERVER_ERROR")
    is_redirect = 300 <= status < 400
    if is_redirect:
        reason = "FORBIDDEN"
    elif status < 500:
        reason = next((_TELLING[code] for code in codes if code in _TELLING), reason)
    if reason == "BAD_REQUEST" and any(words in body.lower().decode(errors="replace") for words in _TOO_LONG):
        reason = "CONTEXT_LENGTH_EXCEEDED"
    _log.debug("a provider refused", runtime=runtime, status=status, reason=reason, code=" ".join(codes))
    if is_redirect:
        return failure(reason, "the provider wants another address to be asked, which is not done")
    return failure(reason, retry_after_s=retry_after_s)


def broken_off(runtime: str, said: object) -> ProviderFailure:
    """What an error in the middle of a stream means."""
    codes = _codes(said)
    known = _TELLING | _PLAIN
    reason = next((known[code] for code in codes), "SERVER_ERROR")
    _log.debug("a provider broke off", runtime=runtime, reason=reason, code=" ".join(codes))
    return failure(reason)


def _codes(said: object) -> list[str]:
    """The codes and types of an error that are known here; the more telling ones first."""
    if not isinstance(said, Mapping):
        return []
    inner = said.get("error")
    error = inner if isinstance(inner, Mapping) else said
    found = [error.get("code"), error.get("type")]
    codes = [code for code in found if isinstance(code, str) and code in _TELLING | _PLAIN]
    return sorted(codes, key=lambda code: code not in _TELLING)
