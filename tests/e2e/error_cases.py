"""The table of `test_errors.py`: calls that fail for what their fields say, or for the state of a cache."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import text_format
from google.rpc import code_pb2
from quire.v1 import executor_pb2 as pb

# Of the weightless model, and of the gateway that the cases are for.
VOCAB = 1024
MASK_BYTES = VOCAB // 8
MAX_SEQ_LEN = 32768
# 64 pages, see conftest: what one sequence can have of these.
KV_CAPACITY = 64 * 16
MAX_RESPONSE_BYTES = 524_288
MAX_ITEMS = 1024
# What the cache holds that the cases are about.
PROMPT = list(range(1, 21))
INVALID = code_pb2.INVALID_ARGUMENT
BIG = 2**32 - 1

Request = Any  # One of the API's request messages.


@dataclass(frozen=True)
class Case:
    """A call that fails. `text`: the request in protobuf's text format; CACHE is the id of a cache."""

    rpc: str
    text: str
    reason: str
    # The field at fault, of an invalid argument.
    at: str = ""
    code: int = INVALID
    metadata: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.rpc} {self.reason} {self.text[:60]}"

    def request(self, cache: str) -> Request:
        """The request, for a cache that holds PROMPT."""
        return self.parsed(f"{self.rpc}Request", cache)

    def parsed(self, message: str, cache: str) -> Request:
        """The same fields in another message. Raises ParseError if it has no such field."""
        return _parsed(self.text.replace("CACHE", cache), message)


@functools.cache
def _parsed(text: str, message: str) -> Request:
    """Most is in a batch, too, and the largest take a second."""
    return text_format.Parse(text, getattr(pb, message)())


def quoted(data: bytes) -> str:
    """Bytes in the text format."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in data) + '"'


# Valid requests, but for what is added to them. The cache of some exists; others are refused before that.
PREFILL = "token_ids: 1 "
DECODE = "cache_id: 'CACHE' token_id: 1 "
VERIFY = "cache_id: 'CACHE' token_ids: [1, 2] "
FORWARD = "token_ids: [1, 2] "
FORK = "forks { cache_id: 'kv' count: 1 } "
KEEP_ALL = "accept: VERIFY_ACCEPT_ALL "
APPENDS = {"Prefill": PREFILL, "Decode": DECODE, "ForwardVerify": VERIFY + KEEP_ALL, "Forward": FORWARD}
NO_PATH, SPECULATIVE = "accept: VERIFY_ACCEPT_GREEDY ", "accept: VERIFY_ACCEPT_SPECULATIVE "

TOKENS = [
    ("Prefill", "", "EMPTY_TOKENS", "token_ids"),
    ("ForwardVerify", "cache_id: 'CACHE'", "EMPTY_TOKENS", "token_ids"),
    ("Forward", "", "EMPTY_TOKENS", "token_ids"),
    ("Decode", "cache_id: 'CACHE'", "EMPTY_TOKENS", "token_id"),
    ("Decode", f"cache_id: 'CACHE' token_id: {VOCAB}", "TOKEN_OUT_OF_VOCAB", "token_id"),
    ("Prefill", f"token_ids: [1, {VOCAB}, {VOCAB}]", "TOKEN_OUT_OF_VOCAB", "token_ids[1]"),
    ("Prefill", f"token_ids: [1, {BIG}, 2]", "TOKEN_OUT_OF_VOCAB", "token_ids[1]"),
    ("ForwardVerify", f"cache_id: 'CACHE' token_ids: [1, {VOCAB}]", "TOKEN_OUT_OF_VOCAB", "token_ids[1]"),
    ("Forward", f"token_ids: [1, {VOCAB}]", "TOKEN_OUT_OF_VOCAB", "token_ids[1]"),
]


def _biases(count: int, value: str) -> str:
    biases = (f"logit_bias {{ key: {token} value: {value} }}" for token in range(count))
    return f"sampling {{ {' '.join(biases)} }}"


_BIAS, _MASK = "output.sampling.logit_bias", "output.mask"
_ZEROS, _ONES = bytes(MASK_BYTES), b"\xff" * MASK_BYTES
# Fields of `output`. tests/service/test_validation.py has the ends of the ranges.
OUTPUTS = [
    ("logits: 9", "BAD_OUTPUT", "output.logits"),
    ("top_logprobs: 1025", "BAD_OUTPUT", "output.top_logprobs"),
    # Nor does a number like this hurt the rest of a batch.
    (f"top_logprobs: {BIG}", "BAD_OUTPUT", "output.top_logprobs"),
    ("logprob_token_ids: 1 " * 4097, "BAD_OUTPUT", "output.logprob_token_ids"),
    (f"logprob_token_ids: [1, {VOCAB}]", "TOKEN_OUT_OF_VOCAB", "output.logprob_token_ids[1]"),
    ("hidden { dtype: 9 }", "BAD_OUTPUT", "output.hidden.dtype"),
    ("hidden { layers: [0, 0, 0, 0, 0, 0, 0, 0, 0] }", "BAD_OUTPUT", "output.hidden.layers"),
    ("sampling { temperature: nan }", "BAD_SAMPLING", "output.sampling.temperature"),
    ("sampling { logit_bias { key: 3 value: nan } }", "BAD_SAMPLING", _BIAS),
    ("sampling { logit_bias { key: 3 value: inf } }", "BAD_SAMPLING", _BIAS),
    (f"sampling {{ logit_bias {{ key: {VOCAB} value: 1 }} }}", "TOKEN_OUT_OF_VOCAB", f"{_BIAS}[{VOCAB}]"),
    (_biases(1025, "1"), "BAD_SAMPLING", _BIAS),
    (_biases(VOCAB, "-inf"), "BAD_MASK", _BIAS),
    ("mask { }", "BAD_MASK", _MASK),
    *(
        (f"mask {{ packed: {quoted(packed)} }}", "BAD_MASK", f"{_MASK}.packed")
        for packed in (b"", _ONES[:-1], _ONES + b"\xff", _ONES + b"\xff\xff\xff\xff")
    ),
    (f"mask {{ packed: {quoted(_ZEROS)} }}", "BAD_MASK", _MASK),
    (f"mask {{ deflated: {quoted(zlib.compress(_ZEROS))} }}", "BAD_MASK", _MASK),
    (f"mask {{ deflated: {quoted(zlib.compress(_ONES)[:-1])} }}", "BAD_MASK", f"{_MASK}.deflated"),
    (f"mask {{ deflated: {quoted(zlib.compress(bytes(1 << 20)))} }}", "BAD_MASK", f"{_MASK}.deflated"),
    ("mask { allowed { } }", "BAD_MASK", f"{_MASK}.allowed"),
    (f"mask {{ allowed {{ ids: [1, 2, {VOCAB}] }} }}", "TOKEN_OUT_OF_VOCAB", f"{_MASK}.allowed.ids[2]"),
    (f"mask {{ forbidden {{ ids: [1, 2, {VOCAB}] }} }}", "TOKEN_OUT_OF_VOCAB", f"{_MASK}.forbidden.ids[2]"),
    (f"mask {{ forbidden {{ ids: {[*range(VOCAB)]} }} }}", "BAD_MASK", _MASK),
    (f"mask {{ allowed {{ ids: {[BIG] * (VOCAB + 1)} }} }}", "BAD_MASK", f"{_MASK}.allowed"),
    ("mask { allowed { ids: 3 } } sampling { logit_bias { key: 3 value: -inf } }", "BAD_MASK", _MASK),
]

_LEASES = ("lease { }", "lease { seconds: -1 }", "lease { nanos: -1 }")
_REQUEST_IDS = ("r" * 129, "\\x1b[31m", "a\\n", "\\u009b", "é")
FIELDS = [
    *(("Prefill", PREFILL + lease, "BAD_LEASE", "lease") for lease in _LEASES),
    *(("RenewCache", f"cache_id: 'kv' {lease}", "BAD_LEASE", "lease") for lease in _LEASES),
    *((rpc, f"{text} priority: 7", "BAD_PRIORITY", "priority") for rpc, text in APPENDS.items()),
    ("TruncateKV", "cache_id: 'kv'", "BAD_FIELD", "new_len"),
    ("Prefill", f"{PREFILL} position: 3", "BAD_POSITION", "position"),
    *(
        (rpc, f"{text} request_id: '{request_id}'", "BAD_REQUEST_ID", "request_id")
        for rpc, text in (
            ("Prefill", PREFILL),
            ("ForkCache", "cache_id: 'kv' count: 1"),
            ("ForkCaches", FORK),
        )
        for request_id in _REQUEST_IDS
    ),
    ("Prefill", f"{PREFILL} cache_salt: '{'s' * 129}'", "BAD_CACHE_SALT", "cache_salt"),
    ("Forward", f"{FORWARD} cache_salt: '{'s' * 129}'", "BAD_CACHE_SALT", "cache_salt"),
    ("Prefill", f"{PREFILL} cache_salt: 's' cache_id: 'kv'", "BAD_CACHE_SALT", "cache_salt"),
    ("Prefill", f"{PREFILL} adapter_id: 'lora' cache_id: 'kv'", "BAD_ADAPTER", "adapter_id"),
    ("Prefill", PREFILL + "sample_seeds: 1 " * 1025, "BAD_COUNT", "sample_seeds"),
    ("Prefill", f"{PREFILL} score_from: 1", "BAD_SCORE_FROM", "score_from"),
    ("Forward", f"{FORWARD} score_from: 2", "BAD_SCORE_FROM", "score_from"),
    ("ForkCache", "cache_id: 'kv' count: 1025", "BAD_COUNT", "count"),
    ("ForkCaches", "", "EMPTY_BATCH", "forks"),
    (
        "ForkCaches",
        f"{FORK} forks {{ cache_id: 'b' }} {FORK}",
        "DUPLICATE_CACHE_IN_BATCH",
        "forks[2].cache_id",
    ),
    ("ForkCaches", f"{FORK} forks {{ count: 1 }}", "EMPTY_CACHE_ID", "forks[1].cache_id"),
    ("ForkCaches", f"{FORK} forks {{ cache_id: 'b' count: 1024 }}", "BAD_COUNT", "forks"),
    ("ForkCaches", f"{FORK} forks {{ cache_id: 'b' count: {BIG} }}", "BAD_COUNT", "forks"),
    ("ForkCaches", FORK + "release: 'kv' " * 4097, "BAD_COUNT", "release"),
    *(
        ("ListCaches", f"page_token: '{token}'", "BAD_PAGE_TOKEN", "page_token")
        for token in ("x", "-1", "9" * 21, "\u0663")
    ),
    *(
        (rpc, "", "EMPTY_BATCH", "items")
        for rpc in ("BatchForward", "BatchPrefill", "BatchDecode", "UnifiedForward")
    ),
]


def _draft(ids: list[int], probabilities: str) -> str:
    """Rows for the tokens [1, 2], the first with a draft."""
    return (
        f"{SPECULATIVE} rows {{ draft {{ token_ids: {ids} probabilities: [{probabilities}] }} }} rows {{ }}"
    )


_DRAFT = "rows { draft { token_ids: 2 probabilities: 1 } } "
_ROW = "rows { } "
_MASKED_ROW = f"rows {{ mask {{ packed: {quoted(_ONES)} }} }} "
_BIASED = f"output {{ sampling {{ logit_bias {{ key: {BIG} value: -inf }} }} }} "
_TREE = f"cache_id: 'kv' {NO_PATH}"
VERIFIES = [
    (VERIFY, "BAD_ACCEPT", "accept"),
    (f"{VERIFY} accept: 9", "BAD_ACCEPT", "accept"),
    (
        f"{VERIFY} {NO_PATH} output {{ sampling {{ temperature: 0.5 }} }}",
        "BAD_SAMPLING",
        "output.sampling.temperature",
    ),
    (VERIFY + NO_PATH + _ROW, "BAD_VERIFY_ROWS", "rows"),
    (VERIFY + SPECULATIVE, "BAD_VERIFY_ROWS", "rows"),
    (VERIFY + SPECULATIVE + _ROW + _ROW, "BAD_DRAFT", "rows[0].draft"),
    (VERIFY + NO_PATH + _DRAFT + _ROW, "BAD_DRAFT", "rows[0].draft"),
    (VERIFY + SPECULATIVE + _DRAFT + _DRAFT, "BAD_DRAFT", "rows[1].draft"),
    (VERIFY + _draft([], ""), "BAD_DRAFT", "rows[0].draft.token_ids"),
    (VERIFY + _draft([2], "0.5, 0.5"), "BAD_DRAFT", "rows[0].draft.token_ids"),
    (VERIFY + _draft([2, 2], "0.5, 0.5"), "BAD_DRAFT", "rows[0].draft.token_ids"),
    (VERIFY + _draft([2, 3], "0.5, 0.6"), "BAD_DRAFT", "rows[0].draft"),
    (VERIFY + _draft([2, 3], "1.5, -0.5"), "BAD_DRAFT", "rows[0].draft"),
    (VERIFY + _draft([2, 3], "nan, 1"), "BAD_DRAFT", "rows[0].draft"),
    (VERIFY + _draft([2, 3], "inf, 0"), "BAD_DRAFT", "rows[0].draft"),
    (VERIFY + _draft([3, 4], "0.5, 0.5"), "BAD_DRAFT", "rows[0].draft"),
    (VERIFY + _draft([2, 3], "0, 1"), "BAD_DRAFT", "rows[0].draft"),
    (VERIFY + _draft([2, VOCAB], "0.5, 0.5"), "TOKEN_OUT_OF_VOCAB", "rows[0].draft.token_ids[1]"),
    (
        f"{VERIFY}{SPECULATIVE} rows {{ draft {{ dense: '1234' }} }} {_ROW}",
        "BAD_DRAFT",
        "rows[0].draft.dense",
    ),
    (f"{VERIFY}{NO_PATH}{_ROW} rows {{ mask {{ packed: {quoted(_ZEROS)} }} }}", "BAD_MASK", "rows[1].mask"),
    (f"{VERIFY}{NO_PATH}{_ROW} rows {{ mask {{ packed: '' }} }}", "BAD_MASK", "rows[1].mask.packed"),
    # Masks of rows are checked before the settings that apply to all of them.
    (f"{VERIFY}{KEEP_ALL}{_ROW}{_MASKED_ROW}{_BIASED}", "TOKEN_OUT_OF_VOCAB", f"{_BIAS}[{BIG}]"),
    (f"{_TREE} token_ids: [1, 1, 1] parents: 0", "BAD_TREE", "parents"),
    (f"{_TREE} token_ids: 1 parents: 0", "BAD_TREE", "parents"),
    (f"{_TREE} token_ids: {[1] * 65} parents: {[0] * 64}", "BAD_TREE", "parents"),
    (f"{_TREE} token_ids: [1, 1, 1] parents: [0, 2]", "BAD_TREE", "parents[1]"),
    (f"{_TREE} token_ids: [1, 1] parents: {BIG}", "BAD_TREE", "parents[0]"),
    (f"cache_id: 'kv' {KEEP_ALL} token_ids: [1, 1] parents: 0", "BAD_ACCEPT", "accept"),
]

# Calls about a cache, CACHE or another one.
ABOUT = {
    "Prefill": "cache_id: 'CACHE' token_ids: 1 POSITION",
    "Decode": f"{DECODE} POSITION",
    "ForwardVerify": f"{VERIFY} {KEEP_ALL} POSITION",
    "ForkCache": "cache_id: 'CACHE' count: 1",
    "ForkCaches": "forks { cache_id: 'CACHE' count: 1 POSITION }",
    "TruncateKV": "cache_id: 'CACHE' new_len: 0 POSITION",
    "RenewCache": "cache_id: 'CACHE'",
}


def cache_cases() -> Iterator[Case]:
    for rpc, text in ABOUT.items():
        here = text.replace("POSITION", "")
        yield Case(rpc, here.replace("CACHE", "kv"), "CACHE_NOT_FOUND", code=code_pb2.NOT_FOUND)
        if rpc != "Prefill":
            at = "forks[0].cache_id" if rpc == "ForkCaches" else "cache_id"
            yield Case(rpc, here.replace("CACHE", ""), "EMPTY_CACHE_ID", at)
        for position in (len(PROMPT) - 1, len(PROMPT) + 1, BIG) if "POSITION" in text else ():
            stated = {"position": str(position), "seq_len": str(len(PROMPT))}
            moved = text.replace("POSITION", f"position: {position}")
            yield Case(rpc, moved, "POSITION_MISMATCH", code=code_pb2.FAILED_PRECONDITION, metadata=stated)
    yield Case("ReleaseCache", "", "EMPTY_CACHE_ID", "cache_id")
    yield Case("ReleaseCache", "request_ids: ['r', '\\000']", "BAD_REQUEST_ID", "request_ids")


def size_cases() -> Iterator[Case]:
    rows = MAX_RESPONSE_BYTES // (4 * VOCAB)
    f32, tokens = "output { logits: DATA_TYPE_F32 } ", f"token_ids: {[1] * rows} "
    items = f"items {{ token_ids: 1 {f32} }} " * rows
    yield Case("Forward", f32 + tokens, "OUTPUT_TOO_LARGE", "output")
    yield Case("ForwardVerify", f"cache_id: 'CACHE' {KEEP_ALL}{f32}{tokens}", "OUTPUT_TOO_LARGE", "output")
    yield Case("BatchPrefill", items, "OUTPUT_TOO_LARGE", "items")
    yield Case("UnifiedForward", items, "OUTPUT_TOO_LARGE", "items")
    # In one message that is parsed at once, and in one that is parsed in pieces.
    for count in (MAX_ITEMS + 1, 40 * MAX_ITEMS):
        yield Case("BatchDecode", "items { } " * count, "TOO_MANY_ITEMS", "items")
        yield Case("ForkCaches", "forks { } " * count, "TOO_MANY_ITEMS", "forks")
        yield Case("ReleaseCache", "request_ids: 'r' " * count, "TOO_MANY_ITEMS", "request_ids")
    for held, count in ((0, KV_CAPACITY + 1), (0, 3 * MAX_SEQ_LEN), (len(PROMPT), KV_CAPACITY)):
        lengths = {"wanted_tokens": str(held + count), "kv_capacity_tokens": str(KV_CAPACITY)}
        cache = "cache_id: 'CACHE'" if held else ""
        # Lengths are checked before contents.
        text = f"{cache} token_ids: {[1 if held else VOCAB] * count}"
        yield Case("Prefill", text, "SEQUENCE_TOO_LONG", code=code_pb2.OUT_OF_RANGE, metadata=lengths)


def state_cases() -> Iterator[Case]:
    for new_len in (len(PROMPT) + 1, BIG):
        lengths = {"new_len": str(new_len), "seq_len": str(len(PROMPT))}
        text = f"cache_id: 'CACHE' new_len: {new_len}"
        yield Case("TruncateKV", text, "TRUNCATE_BEYOND_END", code=code_pb2.OUT_OF_RANGE, metadata=lengths)
    for rpc, text, at in (
        *((rpc, f"{APPENDS[rpc]} adapter_id: 'lora'", "adapter_id") for rpc in ("Prefill", "Forward")),
        *((rpc, f"{text} output {{ hidden {{ }} }}", "output.hidden") for rpc, text in APPENDS.items()),
    ):
        metadata = {"field": at}
        code = code_pb2.FAILED_PRECONDITION
        yield Case(rpc, text, "UNSUPPORTED_BY_EXECUTOR", code=code, metadata=metadata)


CASES: list[Case] = [
    *(Case(*row) for row in TOKENS),
    *(Case("Decode", f"{DECODE} output {{ {text} }}", reason, at) for text, reason, at in OUTPUTS),
    # The other calls have the same checks.
    *(Case(rpc, f"{text} output {{ logits: 9 }}", *OUTPUTS[0][1:]) for rpc, text in APPENDS.items()),
    *(Case(*row) for row in FIELDS),
    *(Case("ForwardVerify", *row) for row in VERIFIES),
    *cache_cases(),
    *size_cases(),
    *state_cases(),
]
