"""From what a server sends to what a client raises."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import grpc
import pytest
import quire
from google.protobuf import any_pb2, wrappers_pb2
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st
from quire.errors import from_rpc_error, from_status

from tests.fake_executor import rich_status

_DETAILS = "grpc-status-details-bin"


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "EMPTY_TOKENS", quire.InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND", quire.CacheNotFound),
        (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND", quire.AdapterNotFound),
        (grpc.StatusCode.NOT_FOUND, "RUNTIME_NOT_FOUND", quire.RuntimeNotFound),
        (grpc.StatusCode.NOT_FOUND, "", quire.NotFound),
        (grpc.StatusCode.ABORTED, "RESUMED_ELSEWHERE", quire.Aborted),
        (grpc.StatusCode.FAILED_PRECONDITION, "EXECUTION_LOST", quire.PreconditionFailed),
        (grpc.StatusCode.FAILED_PRECONDITION, "POSITION_MISMATCH", quire.PositionMismatch),
        (grpc.StatusCode.OUT_OF_RANGE, "SEQUENCE_TOO_LONG", quire.OutOfRange),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", quire.ResourceExhausted),
        (grpc.StatusCode.UNAVAILABLE, "DRAINING", quire.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "STEP_TIMEOUT", quire.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, "", quire.Cancelled),
        (grpc.StatusCode.INTERNAL, "WORKER_FAULT", quire.InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, "", quire.InternalError),
    ],
)
def test_kinds(code: grpc.StatusCode, reason: str, kind: type[quire.QuireError]) -> None:
    error = from_status(rich_status(code, reason, "why"))
    assert type(error) is kind
    assert (error.code, error.reason, error.message) == (code, reason, "why")
    assert error.retry_delay_s is None and error.violations == ()


def test_all_details_are_read_and_unknown_ones_passed_over() -> None:
    status = rich_status(
        grpc.StatusCode.INVALID_ARGUMENT,
        "TOKEN_OUT_OF_VOCAB",
        metadata={"request_id": "r-1"},
        retry_delay_s=1.5,
        violations=[("items[3].token_id", "too large")],
    )
    unknown = any_pb2.Any()
    unknown.Pack(wrappers_pb2.StringValue(value="from the future"))
    status.details.insert(0, unknown)
    error = from_status(status)
    assert error.metadata == {"request_id": "r-1"}
    assert error.retry_delay_s == 1.5
    assert error.violations == (("items[3].token_id", "too large"),)


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_comes_from_another_process_as_it_was(
    copied: Callable[[quire.QuireError], quire.QuireError],
) -> None:
    """An error that cannot be read breaks a pool of processes, or makes it wait for ever."""
    status = rich_status(
        grpc.StatusCode.FAILED_PRECONDITION,
        "POSITION_MISMATCH",
        "why",
        metadata={"seq_len": "3"},
        retry_delay_s=1.5,
        violations=[("position", "too large")],
    )
    error = from_status(status)
    again = copied(error)
    assert isinstance(again, quire.PositionMismatch) and again.seq_len == 3
    assert vars(again) == vars(error) and str(again) == str(error)


def rpc_error(code: grpc.StatusCode, details: bytes) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata((_DETAILS, details), ("other", "x"))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, "plain")


def test_details_of_another_failure_are_passed_over() -> None:
    other = rich_status(grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND", "rich")
    error = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, other.SerializeToString()))
    assert (type(error), error.reason, error.message) == (quire.Unavailable, "", "plain")


@given(st.binary(max_size=64), st.sampled_from(list(grpc.StatusCode)))
def test_any_bytes_are_survived(details: bytes, code: grpc.StatusCode) -> None:
    error = from_rpc_error(rpc_error(code, details))
    assert isinstance(error, quire.QuireError)
    assert error.code == code


def test_a_code_that_does_not_exist() -> None:
    error = from_status(status_pb2.Status(code=77, message="odd"))
    assert (type(error), error.code) == (quire.InternalError, grpc.StatusCode.UNKNOWN)
