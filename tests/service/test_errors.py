"""Every failure has a code, a stable reason, and details that a client can parse and gRPC can carry.

docs/errors.md names every reason that a client can see, with its code, its metadata, and whether to retry.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import example, given
from hypothesis import strategies as st

from service import errors
from service.api.status import from_status, to_status

ROOT = Path(__file__).resolve().parents[2]
# Of the 16 KiB that peers allow for all metadata of a call.
MAX_DETAIL_BYTES = 4096
WIDE = st.text(st.characters(codec="utf-8"), max_size=2000)


def unpacked(status: status_pb2.Status) -> list[Message]:
    found: list[Message] = []
    for detail in status.details:
        kinds = (error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest())
        # Unpack fills the message that the detail is of, and leaves the others alone.
        (message,) = [kind for kind in kinds if detail.Unpack(kind)]
        found.append(message)
    return found


# One of each kind, but for those whose reason is given where they are raised.
ERRORS = [
    errors.CacheNotFound(),
    errors.AdapterNotFound("sql"),
    errors.RuntimeNotFound(),
    errors.WeightsChanged(),
    errors.AdapterLost("no"),
    errors.LoadFailed("no"),
    errors.NoMemory(9, 8),
    errors.Loading(),
    errors.NoTokenizer(),
    errors.ExecutionLost(),
    errors.ResumedElsewhere(),
    errors.PositionMismatch(3, 5),
    errors.Unsupported("no", field="adapter_id"),
    errors.SequenceTooLong(9, 8, "inputs[1]"),
    errors.TruncateBeyondEnd(9, 8),
    errors.KvExhausted(9, 8),
    errors.QueueFull(9, 0.25),
    errors.TooManyExecutions(9),
    errors.Overloaded(2.0, 1.0, 1.0),
    errors.CacheLimit(9),
    errors.JournalFull(9),
    errors.AnswersFull(9),
    errors.ArrivingFull(9),
    errors.SessionLimit(9),
    errors.WatchLimit(9),
    errors.HttpLimit(9),
    errors.SlowConsumer(30.0),
    errors.QuotaExceeded("max_per_s", 9, 0.5),
    errors.AdapterLimit("adapters", 9),
    errors.RoleMissing("observe"),
    errors.BadRuntimes("line 3: is not TOML"),
    errors.NoWorker(),
    errors.Draining(),
    errors.SeveralShards(),
    errors.SeveralGateways(),
    errors.GatewayUnavailable(),
    errors.ShardMoved(),
    errors.WorkerLost(),
    errors.JournalUnavailable(),
    errors.StorageUnavailable("No space left on device"),
    errors.DeadlinePassed(),
    errors.MessageTimeout(30.0),
    errors.WorkerFault(),
    errors.HelperFailed(),
    errors.SequenceQuarantined(),
    errors.InternalError(),
    *(
        errors.ProviderFailure(reason, "no", field="stop" if reason == "UNSUPPORTED" else "")
        for reason in errors.PROVIDER_CODES
    ),
]
GIVEN: dict[str, type[errors.QuireError]] = {
    kind.__name__: kind for kind in (errors.InvalidArgument, errors.Unauthenticated)
}


def page() -> dict[str, tuple[str, set[str], str]]:
    """By reason: its code, the keys of its metadata, and whether to retry."""
    rows = {}
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        code = section.partition("\n")[0]
        row = re.compile(r"^\| `([A-Z_]+)` \|[^|]*\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
        for reason, keys, retry in row.findall(section):
            assert reason not in rows, f"{reason} is told twice"
            rows[reason] = code, set(re.findall(r"`(\w+)`", keys)), retry
    return rows


def given_reasons() -> Iterator[tuple[str, str]]:
    """The reasons that are given where errors are raised, with their codes."""
    for path in sorted((ROOT / "service").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                # A reason that several places know has a name in `errors`.
                named = [getattr(errors, arg.id, None) for arg in node.args if isinstance(arg, ast.Name)]
                texts = named + [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                reason = next((text for text in texts if isinstance(text, str) and text.isupper()), None)
                if reason is not None and node.func.id in (*GIVEN, "_check_at_most"):
                    yield reason, GIVEN.get(node.func.id, errors.InvalidArgument).code
    for field in ("calls", "items", "forks", "fields", "inputs"):
        yield errors.too_many(field, 1).reason, errors.InvalidArgument.code


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}-{error.reason}")
def test_each_error_has_what_its_page_says(error: errors.QuireError) -> None:
    status = to_status(error, "r-1")

    assert status.message == error.message
    passed_on = to_status(from_status(status), "r-1")
    assert passed_on.code == status.code and passed_on.message == status.message
    assert unpacked(passed_on) == unpacked(status), "another gateway passes it on as it is"
    info, *rest = unpacked(status)
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason, info.metadata.pop("request_id")) == ("quire", error.reason, "r-1")
    code, keys, retry = page()[error.reason]
    assert (code_pb2.Code.Name(status.code), set(info.metadata)) == (code, keys)
    assert not any(isinstance(detail, error_details_pb2.BadRequest) for detail in rest)
    # Of providers, and of new weights, only some have a delay.
    if not isinstance(error, errors.ProviderFailure | errors.WeightsChanged):
        has_delay = any(isinstance(detail, error_details_pb2.RetryInfo) for detail in rest)
        assert has_delay == ("delay" in retry)


def test_the_page_and_the_list_have_every_reason() -> None:
    def kinds_below(kind: type[errors.QuireError]) -> set[type[errors.QuireError]]:
        return {kind}.union(*(kinds_below(below) for below in kind.__subclasses__()))

    raised = {*GIVEN.values(), *map(type, ERRORS)}
    assert kinds_below(errors.QuireError) == {errors.QuireError, errors.BudgetFull, *raised}
    given = dict(given_reasons())
    assert set(page()) == {error.reason for error in ERRORS} | set(given)
    assert {reason: page()[reason][:2] for reason in given} == {r: (code, set()) for r, code in given.items()}


def test_a_field_is_named() -> None:
    _, violations = unpacked(to_status(errors.InvalidArgument("BAD_MASK", "output.mask", "no")))
    assert isinstance(violations, error_details_pb2.BadRequest)
    (violation,) = violations.field_violations
    assert (violation.field, violation.reason) == ("output.mask", "BAD_MASK")


def test_trouble_with_a_provider_never_looks_like_the_callers_own() -> None:
    assert not {"UNAUTHENTICATED", "PERMISSION_DENIED"} & set(errors.PROVIDER_CODES.values())


@given(message=WIDE, field=WIDE, request_id=st.text(st.characters(codec="utf-8"), max_size=128))
@example("\U0010ffff" * 4096, "\U0010ffff" * 4096, "\U0010ffff" * 128)
def test_details_are_bounded_whatever_is_in_them(message: str, field: str, request_id: str) -> None:
    status = to_status(errors.InvalidArgument("BAD_REQUEST_ID", field, message), request_id)

    assert status.ByteSize() < MAX_DETAIL_BYTES
    assert message.startswith(status.message), "cut between two characters"


@given(delay_s=st.floats(1e-9, 1e6))
def test_retry_info_is_what_was_computed(delay_s: float) -> None:
    _, retry = unpacked(to_status(errors.QueueFull(1, delay_s)))

    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert abs(retry.retry_delay.ToNanoseconds() - delay_s * 1e9) <= 1
