"""Draft distributions that are refused cost nothing."""

from __future__ import annotations

import tracemalloc

import pytest
from quire.v1 import executor_pb2, types_pb2

from service.api.request_limits import RequestLimits
from service.api.verify_rows import check_verify_rows
from service.errors import InvalidArgument

TOKENS = 1_000_000


def test_a_draft_of_too_many_tokens_is_refused_before_it_is_read() -> None:
    """Reading some millions takes a second, in which nobody else is served."""
    draft = types_pb2.DraftProbabilities(token_ids=[1] * TOKENS, probabilities=[1.0] * TOKENS)
    rows = [types_pb2.VerifyRow(draft=draft), types_pb2.VerifyRow()]
    request = executor_pb2.ForwardVerifyRequest(
        cache_id="x", token_ids=[1, 2], rows=rows, accept=types_pb2.VERIFY_ACCEPT_SPECULATIVE
    )
    tracemalloc.start()
    before_bytes = 0
    try:
        # The first one imports what it needs.
        for _ in range(2):
            tracemalloc.reset_peak()
            before_bytes = tracemalloc.get_traced_memory()[0]
            with pytest.raises(InvalidArgument, match="must be 1 to 4096 different tokens"):
                check_verify_rows(request, RequestLimits(100, 1 << 20))
        assert tracemalloc.get_traced_memory()[1] - before_bytes < TOKENS
    finally:
        tracemalloc.stop()
