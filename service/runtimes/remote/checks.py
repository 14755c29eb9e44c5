"""Checks of an item that no provider has to be asked for."""

from __future__ import annotations

from quire.v1 import runner_pb2, types_pb2

from service.api import validation
from service.errors import InvalidArgument
from service.runtimes import items
from service.runtimes.remote.dialects.base import unsupported
from service.text import bounded_json

# How many tokens a provider's model knows is not known here.
_LIMITS = validation.RequestLimits(vocab_size=1 << 32, max_response_bytes=1 << 32)


async def check(item: runner_pb2.ExecuteItem) -> None:
    """Raises InvalidArgument, or ProviderFailure for what no dialect can do."""
    items.check(item)
    if not (item.text or item.tokens.token_ids or item.chat.messages):
        raise InvalidArgument("EMPTY_PROMPT", str(item.WhichOneof("prompt")), "the prompt is empty")
    await bounded_json.check_chat(item.chat)
    _check_sampling(item)
    for name in ("tokens_only", "top_logprobs"):
        if getattr(item, name):
            # Providers tell texts, and neither tokens nor their ids.
            unsupported(name)
    if item.chat.template:
        unsupported("chat.template")
    constraint = item.constraint.WhichOneof("kind")
    if constraint not in (None, "json_schema"):
        unsupported(f"constraint.{constraint}")


def _check_sampling(item: runner_pb2.ExecuteItem) -> None:
    try:
        validation.check_output(types_pb2.OutputOptions(sampling=item.sampling), _LIMITS, 0)
    except InvalidArgument as error:
        raise InvalidArgument(error.reason, error.field.removeprefix("output."), error.message) from None
