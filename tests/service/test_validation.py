"""Requests are refused exactly when the API's comments say so, with the field at fault."""

from __future__ import annotations

import math
import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import timestamp_pb2
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import executor_pb2, types_pb2

from service import errors
from service.api import request_limits, validation
from service.api.request_limits import Experts, RequestLimits
from service.api.status import to_status
from service.api.verify_rows import check_verify_rows
from service.errors import InvalidArgument

VOCAB = 40
LIMITS = RequestLimits(VOCAB, 1 << 20)
BIG = 2**32 - 1
float32s = st.floats(width=32)


def refusal(check: Callable[..., Any], *arguments: object) -> tuple[str, str] | None:
    """The reason and field with which something is refused; None: it is fine."""
    try:
        check(*arguments)
    except errors.InvalidArgument as error:
        return error.reason, error.field
    return None


def refusal_of(output: types_pb2.OutputOptions, limits: RequestLimits = LIMITS) -> tuple[str, str] | None:
    return refusal(validation.check_output, output, limits, 1)


# The ranges as types.proto states them: lowest, whether that is allowed, highest, whether that is allowed.
RANGES = {
    "temperature": (0.0, True, 100.0, True),
    "top_p": (0.0, False, 1.0, True),
    "min_p": (0.0, True, 1.0, True),
    "typical_p": (0.0, False, 1.0, True),
    "repetition_penalty": (0.0, False, 10.0, True),
    "frequency_penalty": (-2.0, True, 2.0, True),
    "presence_penalty": (-2.0, True, 2.0, True),
}


def neighbours(value: float) -> list[float]:
    """A float32, and the ones just below and above it."""
    towards = (-math.inf, math.inf)
    as_32 = (struct.unpack("f", struct.pack("f", value))[0],)
    step = abs(value) * 2**-23 or 2**-149
    return [*as_32, *(value + math.copysign(step, side) for side in towards)]


@pytest.mark.parametrize("name", RANGES)
@given(drawn=float32s, at_an_end=st.integers(0, 5), use_end=st.booleans())
def test_sampling_settings_have_their_ranges(name: str, drawn: float, at_an_end: int, use_end: bool) -> None:
    lowest, with_lowest, highest, with_highest = RANGES[name]
    value = [*neighbours(lowest), *neighbours(highest)][at_an_end] if use_end else drawn
    sampling = types_pb2.SamplingParams()
    setattr(sampling, name, value)
    sent = getattr(sampling, name)
    allowed = lowest < sent < highest or (sent == lowest and with_lowest)
    allowed = allowed or (sent == highest and with_highest)

    expected = None if allowed else ("BAD_SAMPLING", f"output.sampling.{name}")
    assert refusal_of(types_pb2.OutputOptions(sampling=sampling)) == expected


def test_a_deadline_of_years_counts_as_none() -> None:
    deadlines = {None: None, 0.0: 0.0, 3600.0: 3600.0, 1e9: None, 3.6e11: None}
    for left_s, timeout_s in deadlines.items():
        assert validation.timeout_seconds(left_s) == timeout_s


@given(data=st.binary(max_size=200))
def test_any_options_are_accepted_or_refused_with_a_field(data: bytes) -> None:
    try:
        output = types_pb2.OutputOptions.FromString(data)
    except DecodeError:
        return
    refused = refusal_of(output)
    assert refused is None or refused[1].startswith("output.")


# The size of answers: what passes the check can be sent, so nothing is applied whose answer is lost.

FORMAT_BYTES = {
    types_pb2.DATA_TYPE_UNSPECIFIED: 0,
    types_pb2.DATA_TYPE_F32: 4,
    types_pb2.DATA_TYPE_BF16: 2,
    types_pb2.DATA_TYPE_F16: 2,
}
DTYPE_BYTES = FORMAT_BYTES | {types_pb2.DATA_TYPE_UNSPECIFIED: 4}
HANDLE = types_pb2.KvCacheHandle(
    cache_id="kv_" + "x" * 24,
    seq_len=BIG,
    epoch=2**64 - 1,
    worker_id="worker-1000000",
    expire_time=timestamp_pb2.Timestamp(seconds=253_402_300_799, nanos=10**9 - 1),
)
TIMING = types_pb2.StepTiming(queue_ns=2**64 - 1, compute_ns=2**64 - 1, steps=BIG, batch_items=BIG)


def largest_row(output: types_pb2.OutputOptions, vocab_size: int) -> types_pb2.StepOutput:
    """What a worker returns for a row, with every number as wide as it can be."""
    row = types_pb2.StepOutput(token_id=BIG, logprob=-1.0)
    row.top.token_ids.extend([BIG] * output.top_logprobs)
    row.top.logprobs.extend([-1.0] * output.top_logprobs)
    row.chosen_logprobs.extend([-1.0] * len(output.logprob_token_ids))
    if output.logits:
        row.logits.dtype = types_pb2.DATA_TYPE_F16
        row.logits.shape.append(vocab_size)
        row.logits.data = b"\xff" * (FORMAT_BYTES[output.logits] * vocab_size)
    return row


@given(
    logits=st.sampled_from(sorted(FORMAT_BYTES)),
    vocab_size=st.integers(1, 3000),
    top=st.integers(0, 200),
    chosen=st.integers(0, 200),
    rows=st.integers(1, 20),
    layers=st.none() | st.lists(st.integers(0, 3), max_size=8),
    hidden_size=st.integers(1, 3000),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
)
def test_no_answer_is_larger_than_was_checked(
    logits: types_pb2.DataType,
    vocab_size: int,
    top: int,
    chosen: int,
    rows: int,
    layers: list[int] | None,
    hidden_size: int,
    dtype: types_pb2.DataType,
) -> None:
    output = types_pb2.OutputOptions(
        logits=logits, top_logprobs=min(top, vocab_size), logprob_token_ids=[0] * chosen, logprob=True
    )
    limits = RequestLimits(vocab_size, 1 << 30, hidden_size=hidden_size, num_layers=3)
    row = largest_row(output, vocab_size)
    if layers is not None:
        output.hidden.CopyFrom(types_pb2.HiddenStates(layers=layers, dtype=dtype))
        for _ in layers or [3]:
            data = b"\xff" * (DTYPE_BYTES[dtype] * hidden_size)
            row.hidden.add(dtype=dtype or types_pb2.DATA_TYPE_F32, shape=[hidden_size], data=data)

    verify = executor_pb2.ForwardVerifyResponse(
        kv_cache=HANDLE, outputs=[row] * rows, accepted=BIG, timing=TIMING
    )
    forward = executor_pb2.ForwardResponse(
        outputs=[row] * rows, token_logprobs=[-1.0] * (rows - 1), timing=TIMING
    )
    prefill = executor_pb2.PrefillResponse(kv_cache=HANDLE, output=row, reused_tokens=BIG, timing=TIMING)
    batch = executor_pb2.BatchPrefillResponse(
        results=[executor_pb2.BatchPrefillResult(response=prefill)] * rows
    )

    assert verify.ByteSize() <= validation.check_output(output, limits, rows)
    assert forward.ByteSize() <= validation.check_output(output, limits, rows)
    assert batch.ByteSize() <= rows * validation.check_output(output, limits, 1)


def test_hidden_states_are_checked_before_they_are_computed() -> None:
    limits = RequestLimits(VOCAB, 100_000, hidden_size=1024, num_layers=28)

    def refused(rows: int, *layers: int, of: RequestLimits = limits) -> tuple[str, str] | None:
        output = types_pb2.OutputOptions(hidden=types_pb2.HiddenStates(layers=layers))
        return refusal(validation.check_output, output, of, rows)

    assert refused(23) is None and refused(24) == ("OUTPUT_TOO_LARGE", "output")
    assert refused(3, *range(8)) is None and refused(4, *range(8)) == ("OUTPUT_TOO_LARGE", "output")
    assert refused(1, 0, 28) is None
    assert refused(1, 0, 29) == ("BAD_OUTPUT", "output.hidden.layers[1]")
    assert refused(1, *range(9)) == ("BAD_OUTPUT", "output.hidden.layers")
    with pytest.raises(errors.Unsupported):
        refused(1, of=RequestLimits(VOCAB, 100_000))


def test_no_error_of_an_item_is_larger_than_was_checked() -> None:
    token = errors.InvalidArgument(
        "TOKEN_OUT_OF_VOCAB",
        f"items[{BIG}].output.sampling.logit_bias[{BIG}]",
        f"token {BIG} is not below the vocabulary size {BIG}",
    )
    others = [
        errors.PositionMismatch(BIG, BIG),
        errors.SequenceTooLong(2 * BIG, BIG),
        errors.KvExhausted(BIG, BIG),
        errors.QueueFull(BIG, 1.5),
        errors.Unsupported("this executor has no LoRA adapters", field="adapter_id"),
    ]
    for error in (token, *others):
        result = executor_pb2.BatchDecodeResult(error=to_status(error, "r" * 128))
        answer = executor_pb2.BatchDecodeResponse(results=[result])
        assert answer.ByteSize() <= validation.ANSWER_BYTES


def test_a_batch_has_items_and_no_more_than_can_be_answered() -> None:
    limits = RequestLimits(VOCAB, 10 * validation.ANSWER_BYTES)
    expected = {0: ("EMPTY_BATCH", "items"), 1: None, 10: None, 11: ("OUTPUT_TOO_LARGE", "items")}
    for count, refused in expected.items():
        assert refusal(validation.check_batch, [None] * count, limits) == refused
    few = RequestLimits(VOCAB, 1 << 20, max_items=10)
    assert refusal(validation.check_batch, [None] * 10, few) is None
    assert refusal(validation.check_batch, [None] * 11, few) == ("TOO_MANY_ITEMS", "items")


MANY = 1_000_000


def test_a_draft_of_too_many_tokens_is_refused_before_it_is_read() -> None:
    """Reading some millions takes a second, in which nobody else is served."""
    draft = types_pb2.DraftProbabilities(token_ids=[1] * MANY, probabilities=[1.0] * MANY)
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
        assert tracemalloc.get_traced_memory()[1] - before_bytes < MANY
    finally:
        tracemalloc.stop()


LAYERS, PER_TOKEN = 3, 4


@pytest.mark.parametrize("count", [8, 255, 257])
def test_the_first_wrong_row_is_named(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """In whatever block it is. Rows are right unless an expert is unknown or occurs twice."""
    monkeypatch.setattr(request_limits, "_BLOCK_ROWS", 5)
    described = types_pb2.ModelDescription(moe_layers=LAYERS, num_experts=count, experts_per_token=PER_TOKEN)
    model, dice = Experts(described), random.Random(count)
    width = 1 if count <= 256 else 2
    for tokens in range(1, 12):
        rows = [dice.sample(range(count), PER_TOKEN) for _ in range(tokens * LAYERS)]

        def check() -> None:
            data = b"".join(one.to_bytes(width, "little") for row in rows for one in row)  # noqa: B023
            model.check_replay(data, 0, tokens)  # noqa: B023

        check()
        token, layer = divmod(dice.randrange(len(rows)), LAYERS)
        place, other = dice.sample(range(PER_TOKEN), 2)
        row = rows[token * LAYERS + layer]
        for wrong, text in (row[other], "occurs more than once"), (count, f"expert {count} of {count}"):
            row[place] = wrong
            with pytest.raises(InvalidArgument, match=f"{text}, in layer {layer} .* token {token}"):
                check()
