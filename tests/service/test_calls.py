"""The table of calls: all there are, and what becomes of the items of a batch."""

from __future__ import annotations

import asyncio

from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import executor_pb2

from service.api import append_codec, session
from service.api.append_codec import held_bytes
from service.api.calls import CALLS
from service.api.executor import ExecutorApi
from service.api.request_limits import RequestLimits
from service.caches.requests import Append
from service.errors import CacheNotFound
from workers.common import worker_pb2

LIMITS = RequestLimits(40, 1 << 20)
SERVICE = executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"]


def test_the_service_has_every_call_of_the_protos() -> None:
    assert {method.name for method in SERVICE.methods if not hasattr(ExecutorApi, method.name)} == set()


def test_every_call_is_in_a_session_too() -> None:
    fields = executor_pb2.SessionCall.DESCRIPTOR.oneofs_by_name["call"].fields
    assert set(session._CALLS) == {field.name for field in fields}
    assert {call.method for call in session._CALLS.values()} == set(CALLS)


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1))
def test_each_cache_occurs_once_in_a_batch_and_new_ones_at_will(cache_ids: list[str]) -> None:
    items = [executor_pb2.UnifiedForwardItem(cache_id=cache_id, token_ids=[1]) for cache_id in cache_ids]

    request = executor_pb2.UnifiedForwardRequest(items=items)
    checked = asyncio.run(CALLS["UnifiedForward"].check_items(request, LIMITS, None))

    refused = [bool(cache_id) and cache_ids.count(cache_id) > 1 for cache_id in cache_ids]
    asked = [request.cache_id for request in checked if isinstance(request, Append)]
    assert asked == [name for name, is_refused in zip(cache_ids, refused, strict=True) if not is_refused]
    answer = executor_pb2.UnifiedForwardResponse()
    CALLS["UnifiedForward"].write_items(checked, [CacheNotFound() for _ in asked], "r-7", answer)
    reasons = {True: "DUPLICATE_CACHE_IN_BATCH", False: "CACHE_NOT_FOUND"}
    for index, (result, is_refused) in enumerate(zip(answer.results, refused, strict=True)):
        info, violations = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        assert result.error.details[0].Unpack(info) and info.reason == reasons[is_refused]
        if is_refused:
            assert result.error.details[1].Unpack(violations)
            assert [v.field for v in violations.field_violations] == [f"items[{index}].cache_id"]


def test_the_row_that_samples_are_drawn_from_is_counted_with_the_call() -> None:
    """A worker keeps it until all are drawn."""
    few, many = (executor_pb2.PrefillRequest(token_ids=[1], sample_seeds=range(n)) for n in (0, 1))
    without, with_samples = [held_bytes([CALLS["Prefill"].check(each, LIMITS, None)]) for each in (few, many)]
    assert with_samples - without >= 4 * LIMITS.vocab_size


def test_the_same_options_are_the_same_bytes() -> None:
    """However their maps were filled: by the bytes a repetition is known."""
    biases = [(token, -1.0) for token in range(200)]
    requests = [executor_pb2.DecodeRequest(cache_id="a", token_id=1) for _ in range(2)]
    for request, its in zip(requests, (biases, biases[::-1]), strict=True):
        request.output.sampling.logit_bias.update(its)
    limits = RequestLimits(vocab_size=300, max_response_bytes=1 << 20)
    one, other = (append_codec.decode(request, limits, None) for request in requests)
    assert one == other
    assert worker_pb2.ForwardOptions.FromString(one.options).output == requests[0].output
