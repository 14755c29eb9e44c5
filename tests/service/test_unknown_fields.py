"""Settings of a newer client, or of a newer gateway to a worker: refused by their field, never ignored."""

from __future__ import annotations

from typing import Any

import pytest
from quire.v1 import executor_pb2, runner_pb2, types_pb2

from service.api import append_codec
from service.api.request_limits import RequestLimits
from service.caches.answers import CommandFailed
from service.errors import InvalidArgument, Unsupported
from service.pool import wire
from service.runtimes import items
from workers.common import worker_pb2

# A field that no message has: number 200, a varint.
UNKNOWN = bytes([0xC0, 0x0C, 0x01])
LIMITS = RequestLimits(40, 1 << 20, hidden_size=8, num_layers=2)


def with_unknown(message: Any, *path: str | int) -> Any:
    """Mutates the message: the one in it at the path gets an unknown field. Returns the message."""
    inner = message
    for step in path:
        inner = inner[step] if isinstance(step, int) else getattr(inner, step)
    inner.MergeFromString(UNKNOWN)
    return message


def decode(output: dict[str, Any]) -> executor_pb2.DecodeRequest:
    return executor_pb2.DecodeRequest(cache_id="c", token_id=1, output=types_pb2.OutputOptions(**output))


@pytest.mark.parametrize(
    ("path", "output"),
    [
        (("output",), {}),
        (("output", "sampling"), {"sampling": {"temperature": 1.0, "logit_bias": {3: 1.0}}}),
        (("output", "mask"), {"mask": {"packed": b"\xff" * 5}}),
        (("output", "mask", "allowed"), {"mask": {"allowed": {"ids": [1]}}}),
        (("output", "hidden"), {"hidden": {"layers": [1]}}),
    ],
)
def test_an_unknown_setting_of_an_append_is_refused_by_its_path(
    path: tuple[str, ...], output: dict[str, Any]
) -> None:
    append_codec.decode(decode(output), LIMITS, None)
    with pytest.raises(InvalidArgument) as refused:
        append_codec.decode(with_unknown(decode(output), *path), LIMITS, None)
    assert (refused.value.reason, refused.value.field) == ("UNKNOWN_FIELD", ".".join((*path, "200")))


def test_an_unknown_setting_of_a_row_is_refused_by_its_path() -> None:
    mask = types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=[1]))
    request = executor_pb2.ForwardVerifyRequest(
        cache_id="c",
        token_ids=[1, 2],
        rows=[types_pb2.VerifyRow(), types_pb2.VerifyRow(mask=mask)],
        accept=types_pb2.VERIFY_ACCEPT_ALL,
    )
    append_codec.verify(request, LIMITS, None)
    with pytest.raises(InvalidArgument) as refused:
        append_codec.verify(with_unknown(request, "rows", 1, "mask", "allowed"), LIMITS, None)
    assert (refused.value.reason, refused.value.field) == ("UNKNOWN_FIELD", "rows[1].mask.allowed.200")


@pytest.mark.parametrize(
    ("path", "field"),
    [((), "200"), (("sampling",), "sampling.200"), (("chat", "messages", 1), "chat.messages[1].200")],
)
def test_an_unknown_field_of_an_item_is_refused_by_its_path(path: tuple[str | int, ...], field: str) -> None:
    user = runner_pb2.ChatMessage(role=runner_pb2.CHAT_ROLE_USER, content="x")
    item = runner_pb2.ExecuteItem(item_id="i", chat=runner_pb2.Chat(messages=[user, user]))
    item.sampling.temperature = 1
    items.check(item)
    with pytest.raises(InvalidArgument) as refused:
        items.check(with_unknown(item, *path))
    assert (refused.value.reason, refused.value.field) == ("UNKNOWN_FIELD", field)


@pytest.mark.parametrize("told", ["output.sampling.min_p", "verify_rows[1].draft.200", ""])
def test_what_a_worker_of_older_code_does_not_know_is_told_to_the_caller(told: str) -> None:
    error = worker_pb2.WorkerError(reason=worker_pb2.WORKER_ERROR_REASON_UNSUPPORTED, field=told)
    response = worker_pb2.ConnectResponse(events=[worker_pb2.WorkerEvent(op_id=3, error=error)])
    ((op_id, failed),) = wire.to_events(response)
    assert op_id == 3 and isinstance(failed, CommandFailed)
    assert isinstance(failed.error, Unsupported) and not failed.kv_missing
    assert failed.error.field == told


def test_what_is_known_is_passed_on_as_it_was_sent() -> None:
    request = decode({"logprob_token_ids": [3, 1]})
    options = worker_pb2.ForwardOptions.FromString(append_codec.decode(request, LIMITS, None).options)
    assert options.output == request.output
