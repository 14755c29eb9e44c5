"""Every failure has a code, a stable reason, and details that a client can parse and gRPC can carry."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from service import errors
from service.api.status import MAX_DETAIL_BYTES, to_status

BIG = 2**32 - 1
WIDE = st.text(st.characters(codec="utf-8"), max_size=2000)


def unpacked(status: status_pb2.Status) -> list[Message]:
    found: list[Message] = []
    for detail in status.details:
        kinds = (error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest())
        # Unpack fills the message that the detail is of, and leaves the others alone.
        (message,) = [kind for kind in kinds if detail.Unpack(kind)]
        found.append(message)
    return found


# One of each kind: the error, its code, its reason, whether a retry can help.
ROWS = [
    (errors.InvalidArgument("BAD_MASK", "output.mask", "no"), code_pb2.INVALID_ARGUMENT, "BAD_MASK", False),
    (errors.CacheNotFound(), code_pb2.NOT_FOUND, "CACHE_NOT_FOUND", False),
    (errors.RuntimeNotFound(), code_pb2.NOT_FOUND, "RUNTIME_NOT_FOUND", False),
    (errors.WeightsChanged(), code_pb2.FAILED_PRECONDITION, "WEIGHTS_CHANGED", False),
    (errors.WeightsChanged(can_be_repeated=True), code_pb2.FAILED_PRECONDITION, "WEIGHTS_CHANGED", True),
    (errors.LoadFailed("no"), code_pb2.FAILED_PRECONDITION, "LOAD_FAILED", False),
    (errors.NoMemory(9, 8), code_pb2.RESOURCE_EXHAUSTED, "NO_MEMORY", False),
    (errors.Loading(), code_pb2.ABORTED, "LOADING", True),
    (errors.NoTokenizer(), code_pb2.FAILED_PRECONDITION, "NO_TOKENIZER", False),
    (errors.ExecutionLost(), code_pb2.FAILED_PRECONDITION, "EXECUTION_LOST", False),
    (errors.ResumedElsewhere(), code_pb2.ABORTED, "RESUMED_ELSEWHERE", False),
    (errors.PositionMismatch(3, 5), code_pb2.FAILED_PRECONDITION, "POSITION_MISMATCH", False),
    (errors.Unsupported("no"), code_pb2.FAILED_PRECONDITION, "UNSUPPORTED_BY_EXECUTOR", False),
    (errors.SequenceTooLong(9, 8), code_pb2.OUT_OF_RANGE, "SEQUENCE_TOO_LONG", False),
    (errors.TruncateBeyondEnd(9, 8), code_pb2.OUT_OF_RANGE, "TRUNCATE_BEYOND_END", False),
    (errors.KvExhausted(9, 8), code_pb2.RESOURCE_EXHAUSTED, "KV_EXHAUSTED", True),
    (errors.QueueFull(9, 0.25), code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", True),
    (errors.TooManyExecutions(9, 1.0), code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", True),
    (errors.Overloaded(2.0, 1.0, 1.0), code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED", True),
    (errors.CacheLimit(9), code_pb2.RESOURCE_EXHAUSTED, "CACHE_LIMIT", True),
    (errors.JournalFull(9), code_pb2.RESOURCE_EXHAUSTED, "JOURNAL_FULL", True),
    (errors.AnswersFull(9), code_pb2.RESOURCE_EXHAUSTED, "ANSWERS_FULL", True),
    (errors.ArrivingFull(9), code_pb2.RESOURCE_EXHAUSTED, "ARRIVING_FULL", True),
    (errors.SessionLimit(9), code_pb2.RESOURCE_EXHAUSTED, "SESSION_LIMIT", True),
    (errors.SlowConsumer(30.0), code_pb2.RESOURCE_EXHAUSTED, "SLOW_CONSUMER", False),
    (errors.QuotaExceeded("max_per_s", 9, 0.5), code_pb2.RESOURCE_EXHAUSTED, "QUOTA", True),
    (errors.QuotaExceeded("max_caches", 9), code_pb2.RESOURCE_EXHAUSTED, "QUOTA", False),
    (errors.Unauthenticated("BAD_TOKEN", "no"), code_pb2.UNAUTHENTICATED, "BAD_TOKEN", False),
    (errors.RoleMissing("observe"), code_pb2.PERMISSION_DENIED, "ROLE_MISSING", False),
    (errors.BadRuntimes("line 3: is not TOML"), code_pb2.FAILED_PRECONDITION, "BAD_RUNTIMES", False),
    (errors.NoWorker(), code_pb2.UNAVAILABLE, "NO_WORKER", True),
    (errors.Draining(), code_pb2.UNAVAILABLE, "DRAINING", True),
    (errors.WorkerLost(), code_pb2.UNAVAILABLE, "WORKER_LOST", True),
    (errors.JournalUnavailable(), code_pb2.UNAVAILABLE, "JOURNAL_UNAVAILABLE", True),
    (errors.DeadlinePassed(), code_pb2.DEADLINE_EXCEEDED, "DEADLINE_PASSED", False),
    (errors.MessageTimeout(30.0), code_pb2.DEADLINE_EXCEEDED, "MESSAGE_TIMEOUT", False),
    (errors.WorkerFault(), code_pb2.INTERNAL, "WORKER_FAULT", False),
    (errors.SequenceQuarantined(), code_pb2.INTERNAL, "SEQUENCE_QUARANTINED", False),
    (errors.InternalError(), code_pb2.INTERNAL, "INTERNAL", False),
]
PROVIDER_ROWS = [
    (errors.ProviderFailure(reason, "no"), code_pb2.Code.Value(code), reason, False)
    for reason, code in errors.PROVIDER_CODES.items()
]


@pytest.mark.parametrize(
    ("error", "code", "reason", "retry"),
    [*ROWS, *PROVIDER_ROWS],
    ids=[f"{type(row[0]).__name__}-{row[2]}-{row[3]}" for row in [*ROWS, *PROVIDER_ROWS]],
)
def test_each_error_has_its_code_reason_and_details(
    error: errors.QuireError, code: int, reason: str, retry: bool
) -> None:
    status = to_status(error, "r-1")

    assert status.code == code
    assert status.message == error.message
    info, *rest = unpacked(status)
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason, info.metadata["request_id"]) == ("quire", reason, "r-1")
    assert any(isinstance(detail, error_details_pb2.RetryInfo) for detail in rest) == retry
    violations = [d for d in rest if isinstance(d, error_details_pb2.BadRequest)]
    assert bool(violations) == (code == code_pb2.INVALID_ARGUMENT)
    if violations:
        (violation,) = violations[0].field_violations
        assert (violation.field, violation.reason) == ("output.mask", "BAD_MASK")


def test_trouble_with_a_provider_never_looks_like_the_callers_own() -> None:
    assert not {"UNAUTHENTICATED", "PERMISSION_DENIED"} & set(errors.PROVIDER_CODES.values())


def test_every_error_there_is_has_a_row() -> None:
    def kinds_below(kind: type[errors.QuireError]) -> set[type[errors.QuireError]]:
        return {kind}.union(*(kinds_below(below) for below in kind.__subclasses__()))

    # Its reasons and codes are a table of their own.
    kinds = kinds_below(errors.QuireError) - {errors.QuireError, errors.ProviderFailure}
    assert kinds == {type(row[0]) for row in ROWS}


@given(message=WIDE, field=WIDE, request_id=st.text(st.characters(codec="utf-8"), max_size=128))
def test_details_are_bounded_whatever_is_in_them(message: str, field: str, request_id: str) -> None:
    status = to_status(errors.InvalidArgument("BAD_REQUEST_ID", field, message), request_id)

    assert status.ByteSize() < MAX_DETAIL_BYTES


def test_details_of_the_widest_characters_are_bounded() -> None:
    wide = "\U0010ffff" * 4096

    status = to_status(errors.InvalidArgument("BAD_REQUEST_ID", wide, wide), wide[:128])

    assert status.ByteSize() < MAX_DETAIL_BYTES
    assert status.message.strip("\U0010ffff") == ""


@given(delay_s=st.floats(1e-9, 1e6))
def test_retry_info_is_what_was_computed(delay_s: float) -> None:
    _, retry = unpacked(to_status(errors.QueueFull(1, delay_s)))

    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert abs(retry.retry_delay.ToNanoseconds() - delay_s * 1e9) <= 1


def test_the_violations_of_an_item_are_seen_from_its_batch() -> None:
    error = errors.InvalidArgument("TOKEN_OUT_OF_VOCAB", "token_ids[2]", "no").nested_in("items[7]")

    assert (error.reason, error.field, error.message) == ("TOKEN_OUT_OF_VOCAB", "items[7].token_ids[2]", "no")
