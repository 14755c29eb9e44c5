"""The table of `test_errors.py`: calls that fail for what their fields say, or for the state of a cache."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import duration_pb2
from google.rpc import code_pb2
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2 as types

# Of the weightless model, and of the gateway that the cases are for.
VOCAB = 1024
MAX_SEQ_LEN = 32768
# 64 pages, see conftest: what one sequence can have of these.
KV_CAPACITY = 64 * 16
MAX_RESPONSE_BYTES = 524_288
MAX_ITEMS = 1024
# What the cache holds that the cases are about.
PROMPT = list(range(1, 21))
UNKNOWN = "kv_never_existed"
NAN, INF = math.nan, math.inf
INVALID = code_pb2.INVALID_ARGUMENT

Request = Any  # One of the API's request messages.


@dataclass(frozen=True)
class Case:
    """A call that fails. `request` is given the id of a cache that holds PROMPT."""

    name: str
    rpc: str
    request: Callable[[str], Request]
    code: int
    reason: str
    # The field at fault, of an invalid argument.
    at: str = ""
    metadata: dict[str, str] = field(default_factory=dict)


# Options that no call takes, with the reason and the field.

Bad = tuple[str, types.OutputOptions, str, str]


def bad_sampling() -> Iterator[Bad]:
    out_of_range = {
        "temperature": (-0.1, 100.5, NAN, INF, -INF),
        "top_p": (0.0, -0.5, 1.1, NAN, INF),
        "min_p": (-0.1, 1.1, NAN, INF),
        "repetition_penalty": (0.0, -1.0, 10.5, NAN, INF),
        "frequency_penalty": (-2.5, 2.5, NAN, INF),
        "presence_penalty": (-2.5, 2.5, NAN, -INF),
    }
    for name, values in out_of_range.items():
        for value in values:
            sampling = types.SamplingParams()
            setattr(sampling, name, value)
            options = types.OutputOptions(sampling=sampling)
            yield f"{name}={value}", options, "BAD_SAMPLING", f"output.sampling.{name}"
    where = "output.sampling.logit_bias"
    biases: list[tuple[str, dict[int, float], str, str]] = [
        ("bias NaN", {3: NAN}, "BAD_SAMPLING", where),
        ("bias +inf", {3: INF}, "BAD_SAMPLING", where),
        ("too many biases", dict.fromkeys(range(1025), 1.0), "BAD_SAMPLING", where),
        ("bias of no token", {VOCAB: 1.0}, "TOKEN_OUT_OF_VOCAB", f"{where}[{VOCAB}]"),
        ("all forbidden", dict.fromkeys(range(VOCAB), -INF), "BAD_MASK", where),
    ]
    for name, logit_bias, reason, at in biases:
        yield name, types.OutputOptions(sampling=types.SamplingParams(logit_bias=logit_bias)), reason, at


def bad_output() -> Iterator[Bad]:
    options = types.OutputOptions
    unknown_format: Any = 9
    yield "format", options(logits=unknown_format), "BAD_OUTPUT", "output.logits"
    yield "top_logprobs", options(top_logprobs=1025), "BAD_OUTPUT", "output.top_logprobs"
    # Nor does a number like this hurt the rest of a batch.
    yield "huge top_logprobs", options(top_logprobs=2**32 - 1), "BAD_OUTPUT", "output.top_logprobs"
    chosen = "output.logprob_token_ids"
    yield "many logprobs", options(logprob_token_ids=[1] * 4097), "BAD_OUTPUT", chosen
    unknown_dtype = types.HiddenStates(dtype=unknown_format)
    yield "hidden format", options(hidden=unknown_dtype), "BAD_OUTPUT", "output.hidden.dtype"
    many = types.HiddenStates(layers=[0] * 9)
    yield "many layers", options(hidden=many), "BAD_OUTPUT", "output.hidden.layers"
    yield "logprob", options(logprob_token_ids=[1, VOCAB]), "TOKEN_OUT_OF_VOCAB", f"{chosen}[1]"


def bad_masks() -> Iterator[Bad]:
    def masked(**kind: Any) -> types.OutputOptions:
        return types.OutputOptions(mask=types.TokenMask(**kind))

    yield "empty mask", masked(), "BAD_MASK", "output.mask"
    for size in (0, VOCAB // 8 - 1, VOCAB // 8 + 1, VOCAB // 8 + 4):
        yield f"mask of {size}", masked(packed=b"\xff" * size), "BAD_MASK", "output.mask.packed"
    yield "mask of zeros", masked(packed=bytes(VOCAB // 8)), "BAD_MASK", "output.mask"
    yield "nothing allowed", masked(allowed=types.TokenIds()), "BAD_MASK", "output.mask.allowed"
    outside = types.TokenIds(ids=[1, 2, VOCAB])
    yield "allowed", masked(allowed=outside), "TOKEN_OUT_OF_VOCAB", "output.mask.allowed.ids[2]"
    for name, deflated in (
        ("garbage", b"garbage"),
        ("a bomb", zlib.compress(bytes(1 << 20))),
        ("too short", zlib.compress(b"\xff" * (VOCAB // 8 - 1))),
        ("half a stream", zlib.compress(b"\xff" * (VOCAB // 8))[:-1]),
    ):
        yield f"deflated {name}", masked(deflated=deflated), "BAD_MASK", "output.mask.deflated"
    zeros = zlib.compress(bytes(VOCAB // 8))
    yield "deflated zeros", masked(deflated=zeros), "BAD_MASK", "output.mask"
    everything = types.TokenIds(ids=range(VOCAB))
    yield "all listed as forbidden", masked(forbidden=everything), "BAD_MASK", "output.mask"
    yield "forbidden", masked(forbidden=outside), "TOKEN_OUT_OF_VOCAB", "output.mask.forbidden.ids[2]"
    both = masked(allowed=types.TokenIds(ids=[1, 2]))
    both.sampling.logit_bias.update({1: -INF, 2: -INF})
    yield "allowed and forbidden", both, "BAD_MASK", "output.mask"


def with_output(rpc: str, output: types.OutputOptions) -> Callable[[str], Request]:
    """A request that is fine but for its output."""
    return {
        "Prefill": lambda _cache: pb.PrefillRequest(token_ids=[1, 2], output=output),
        "Decode": lambda cache: pb.DecodeRequest(cache_id=cache, token_id=1, output=output),
        "ForwardVerify": lambda cache: pb.ForwardVerifyRequest(
            cache_id=cache, token_ids=[1, 2], output=output
        ),
        "Forward": lambda _cache: pb.ForwardRequest(token_ids=[1, 2], output=output),
    }[rpc]


def output_cases() -> Iterator[Case]:
    for name, output, reason, at in (*bad_output(), *bad_sampling(), *bad_masks()):
        for rpc in ("Prefill", "Decode", "ForwardVerify", "Forward"):
            yield Case(f"{rpc} {name}", rpc, with_output(rpc, output), INVALID, reason, at)


def token_cases() -> Iterator[Case]:
    requests: dict[str, Callable[[str, list[int]], Request]] = {
        "Prefill": lambda cache, tokens: pb.PrefillRequest(cache_id=cache, token_ids=tokens),
        "ForwardVerify": lambda cache, tokens: pb.ForwardVerifyRequest(cache_id=cache, token_ids=tokens),
        "Forward": lambda _cache, tokens: pb.ForwardRequest(token_ids=tokens),
    }
    for rpc, build in requests.items():

        def of(tokens: list[int], build: Callable[[str, list[int]], Request] = build) -> Any:
            return lambda cache: build(cache, tokens)

        yield Case(f"{rpc} no tokens", rpc, of([]), INVALID, "EMPTY_TOKENS", "token_ids")
        for bad in (VOCAB, 2**32 - 1):
            tokens = of([1, bad, 2])
            yield Case(f"{rpc} token {bad}", rpc, tokens, INVALID, "TOKEN_OUT_OF_VOCAB", "token_ids[1]")

    def decode(cache: str) -> Request:
        return pb.DecodeRequest(cache_id=cache, token_id=VOCAB)

    yield Case("Decode token", "Decode", decode, INVALID, "TOKEN_OUT_OF_VOCAB", "token_id")

    def decode_nothing(cache: str) -> Request:
        return pb.DecodeRequest(cache_id=cache)

    yield Case("Decode no token", "Decode", decode_nothing, INVALID, "EMPTY_TOKENS", "token_id")


def by_cache_id(cache: str, position: int | None = None) -> dict[str, Request]:
    """A request of each kind about one cache."""
    return {
        "Prefill": pb.PrefillRequest(cache_id=cache, token_ids=[1], position=position),
        "Decode": pb.DecodeRequest(cache_id=cache, token_id=1, position=position),
        "ForwardVerify": pb.ForwardVerifyRequest(cache_id=cache, token_ids=[1, 2], position=position),
        "ForkCache": pb.ForkCacheRequest(cache_id=cache, count=1),
        "ForkCaches": pb.ForkCachesRequest(forks=[pb.ForkSource(cache_id=cache, count=1, position=position)]),
        "TruncateKV": pb.TruncateKVRequest(cache_id=cache, new_len=0, position=position),
        "RenewCache": pb.RenewCacheRequest(cache_id=cache),
    }


def cache_cases() -> Iterator[Case]:
    for rpc in by_cache_id(""):

        def about(cache: str, rpc: str = rpc) -> Any:
            return lambda _cache: by_cache_id(cache)[rpc]

        def at(position: int, rpc: str = rpc) -> Any:
            return lambda cache: by_cache_id(cache, position)[rpc]

        yield Case(f"{rpc} unknown", rpc, about(UNKNOWN), code_pb2.NOT_FOUND, "CACHE_NOT_FOUND")
        if rpc != "Prefill":
            where = "forks[0].cache_id" if rpc == "ForkCaches" else "cache_id"
            yield Case(f"{rpc} no id", rpc, about(""), INVALID, "EMPTY_CACHE_ID", where)
        if rpc in ("Prefill", "Decode", "ForwardVerify", "ForkCaches", "TruncateKV"):
            for position in (len(PROMPT) - 1, len(PROMPT) + 1, 2**32 - 1):
                yield Case(
                    f"{rpc} position {position}",
                    rpc,
                    at(position),
                    code_pb2.FAILED_PRECONDITION,
                    "POSITION_MISMATCH",
                    metadata={"position": str(position), "seq_len": str(len(PROMPT))},
                )


# A number without a name.
_NO_PRIORITY: Any = 7


def _field_case(rpc: str, request: Request, reason: str, at: str) -> Case:
    return Case(f"{rpc} {reason} {at}", rpc, lambda _cache: request, INVALID, reason, at)


def field_cases() -> Iterator[Case]:
    case = _field_case
    for lease in (
        duration_pb2.Duration(),
        duration_pb2.Duration(seconds=-1),
        duration_pb2.Duration(nanos=-1),
    ):
        yield case("Prefill", pb.PrefillRequest(token_ids=[1], lease=lease), "BAD_LEASE", "lease")
        yield case("RenewCache", pb.RenewCacheRequest(cache_id=UNKNOWN, lease=lease), "BAD_LEASE", "lease")
    for rpc, request in (
        ("Prefill", pb.PrefillRequest(token_ids=[1], priority=_NO_PRIORITY)),
        ("Decode", pb.DecodeRequest(cache_id=UNKNOWN, token_id=1, priority=_NO_PRIORITY)),
        ("ForwardVerify", pb.ForwardVerifyRequest(cache_id=UNKNOWN, token_ids=[1], priority=_NO_PRIORITY)),
        ("Forward", pb.ForwardRequest(token_ids=[1], priority=_NO_PRIORITY)),
    ):
        yield case(rpc, request, "BAD_PRIORITY", "priority")
    yield case("TruncateKV", pb.TruncateKVRequest(cache_id=UNKNOWN), "BAD_FIELD", "new_len")
    new_at_3 = pb.PrefillRequest(token_ids=[1], position=3)
    yield case("Prefill", new_at_3, "BAD_POSITION", "position")
    for text in ("r" * 129, "\x1b[31m", "a\n", "\u009b", "é"):
        prefill = pb.PrefillRequest(token_ids=[1], request_id=text)
        yield case("Prefill", prefill, "BAD_REQUEST_ID", "request_id")
        fork = pb.ForkCacheRequest(cache_id=UNKNOWN, count=1, request_id=text)
        yield case("ForkCache", fork, "BAD_REQUEST_ID", "request_id")
        forks = pb.ForkCachesRequest(forks=[pb.ForkSource(cache_id=UNKNOWN)], request_id=text)
        yield case("ForkCaches", forks, "BAD_REQUEST_ID", "request_id")
    long_salt = pb.PrefillRequest(token_ids=[1], cache_salt="s" * 129)
    late_salt = pb.PrefillRequest(token_ids=[1], cache_salt="s", cache_id=UNKNOWN)
    for salted in (long_salt, late_salt):
        yield case("Prefill", salted, "BAD_CACHE_SALT", "cache_salt")
    yield case("ForkCache", pb.ForkCacheRequest(cache_id=UNKNOWN, count=1025), "BAD_COUNT", "count")
    yield case(
        "Prefill", pb.PrefillRequest(token_ids=[1], sample_seeds=[1] * 1025), "BAD_COUNT", "sample_seeds"
    )
    for forks, reason, at in _forks():
        yield case("ForkCaches", forks, reason, at)
    for page in ("x", "-1", "9" * 21, "\u0663"):
        yield case("ListCaches", pb.ListCachesRequest(page_token=page), "BAD_PAGE_TOKEN", "page_token")
    unknown_accept: Any = 9
    for accept, sampling, reason, at in (
        (unknown_accept, None, "BAD_ACCEPT", "accept"),
        (
            types.VERIFY_ACCEPT_GREEDY,
            types.SamplingParams(temperature=0.5),
            "BAD_SAMPLING",
            "output.sampling.temperature",
        ),
    ):
        output = types.OutputOptions(sampling=sampling)
        verify = pb.ForwardVerifyRequest(cache_id=UNKNOWN, token_ids=[1], accept=accept, output=output)
        yield case("ForwardVerify", verify, reason, at)
    yield case("Forward", pb.ForwardRequest(token_ids=[1, 2], score_from=2), "BAD_SCORE_FROM", "score_from")
    yield case("Prefill", pb.PrefillRequest(token_ids=[1], score_from=1), "BAD_SCORE_FROM", "score_from")
    yield case(
        "Forward", pb.ForwardRequest(token_ids=[1], cache_salt="s" * 129), "BAD_CACHE_SALT", "cache_salt"
    )
    for rows, accept, reason, at in _verify_rows():
        verify = pb.ForwardVerifyRequest(cache_id=UNKNOWN, token_ids=[1, 2], accept=accept, rows=rows)
        yield case("ForwardVerify", verify, reason, at)
    for verify, reason, at in _trees():
        yield case("ForwardVerify", verify, reason, at)


def batch_cases() -> Iterator[Case]:
    empty: dict[str, Request] = {
        "BatchForward": pb.BatchForwardRequest(),
        "BatchPrefill": pb.BatchPrefillRequest(),
        "BatchDecode": pb.BatchDecodeRequest(),
        "UnifiedForward": pb.UnifiedForwardRequest(),
    }
    for rpc, request in empty.items():
        yield _field_case(rpc, request, "EMPTY_BATCH", "items")


def _trees() -> Iterator[tuple[pb.ForwardVerifyRequest, str, str]]:
    """Trees that are none, or cannot stay: the reason, and where."""
    greedy = types.VERIFY_ACCEPT_GREEDY
    for tokens, parents, accept, reason, at in (
        (3, [0], greedy, "BAD_TREE", "parents"),
        (1, [0], greedy, "BAD_TREE", "parents"),
        (65, [0] * 64, greedy, "BAD_TREE", "parents"),
        (3, [0, 2], greedy, "BAD_TREE", "parents[1]"),
        (2, [2**32 - 1], greedy, "BAD_TREE", "parents[0]"),
        (2, [0], types.VERIFY_ACCEPT_UNSPECIFIED, "BAD_ACCEPT", "accept"),
    ):
        tree = pb.ForwardVerifyRequest(
            cache_id=UNKNOWN, token_ids=[1] * tokens, parents=parents, accept=accept
        )
        yield tree, reason, at


def _forks() -> Iterator[tuple[pb.ForkCachesRequest, str, str]]:
    """Forks of several that cannot be: the reason, and where."""

    def forks(*sources: tuple[str, int], release: int = 0) -> pb.ForkCachesRequest:
        named = [pb.ForkSource(cache_id=cache_id, count=count) for cache_id, count in sources]
        return pb.ForkCachesRequest(forks=named, release=[UNKNOWN] * release)

    yield forks(), "EMPTY_BATCH", "forks"
    yield forks(("a", 1), ("b", 1), ("a", 1)), "DUPLICATE_CACHE_IN_BATCH", "forks[2].cache_id"
    yield forks(("a", 1), ("", 1)), "EMPTY_CACHE_ID", "forks[1].cache_id"
    yield forks(("a", 1024), ("b", 1)), "BAD_COUNT", "forks"
    yield forks(("a", 2**32 - 1), ("b", 2**32 - 1)), "BAD_COUNT", "forks"
    yield forks(("a", 1), release=4097), "BAD_COUNT", "release"


def _verify_rows() -> Iterator[tuple[list[types.VerifyRow], Any, str, str]]:
    """Rows for the tokens [1, 2] that cannot be: how they are accepted, the reason, and where."""
    plain, keep, speculative = types.VerifyRow(), types.VERIFY_ACCEPT_GREEDY, types.VERIFY_ACCEPT_SPECULATIVE

    def draft(ids: list[int], probabilities: list[float], dense: bytes = b"") -> types.VerifyRow:
        drawn_from = types.DraftProbabilities(token_ids=ids, probabilities=probabilities, dense=dense)
        return types.VerifyRow(draft=drawn_from)

    yield [plain], keep, "BAD_VERIFY_ROWS", "rows"
    yield [], speculative, "BAD_VERIFY_ROWS", "rows"
    yield [plain, plain], speculative, "BAD_DRAFT", "rows[0].draft"
    yield [draft([2], [1.0]), plain], keep, "BAD_DRAFT", "rows[0].draft"
    yield [draft([2], [1.0]), draft([2], [1.0])], speculative, "BAD_DRAFT", "rows[1].draft"
    wrong: tuple[tuple[list[int], list[float], str], ...] = (
        ([], [], ".token_ids"),
        ([2], [0.5, 0.5], ".token_ids"),
        ([2, 2], [0.5, 0.5], ".token_ids"),
        ([2, 3], [0.5, 0.6], ""),
        ([2, 3], [1.5, -0.5], ""),
        ([2, 3], [math.nan, 1.0], ""),
        ([2, 3], [math.inf, 0.0], ""),
        ([3, 4], [0.5, 0.5], ""),
        ([2, 3], [0.0, 1.0], ""),
    )
    for ids, probabilities, at in wrong:
        yield [draft(ids, probabilities), plain], speculative, "BAD_DRAFT", f"rows[0].draft{at}"
    outside = draft([2, VOCAB], [0.5, 0.5])
    yield [outside, plain], speculative, "TOKEN_OUT_OF_VOCAB", "rows[0].draft.token_ids[1]"
    yield [draft([], [], b"1234"), plain], speculative, "BAD_DRAFT", "rows[0].draft.dense"
    masked = types.VerifyRow(mask=types.TokenMask(packed=bytes(VOCAB // 8)))
    yield [plain, masked], keep, "BAD_MASK", "rows[1].mask"


def size_cases() -> Iterator[Case]:
    f32 = types.OutputOptions(logits=types.LOGITS_FORMAT_F32)
    rows = MAX_RESPONSE_BYTES // (4 * VOCAB)
    too_many: dict[str, Callable[[str], Request]] = {
        "Forward": lambda _cache: pb.ForwardRequest(token_ids=[1] * rows, output=f32),
        "ForwardVerify": lambda cache: pb.ForwardVerifyRequest(
            cache_id=cache, token_ids=[1] * rows, output=f32
        ),
        "BatchPrefill": lambda _cache: pb.BatchPrefillRequest(
            items=[pb.PrefillRequest(token_ids=[1], output=f32)] * rows
        ),
        "UnifiedForward": lambda _cache: pb.UnifiedForwardRequest(
            items=[pb.UnifiedForwardItem(token_ids=[1], output=f32)] * rows
        ),
    }
    for rpc, request in too_many.items():
        at = "output" if rpc in ("Forward", "ForwardVerify") else "items"
        yield Case(f"{rpc} too large", rpc, request, INVALID, "OUTPUT_TOO_LARGE", at)
    # In one message that is parsed at once, and in one that is parsed in pieces.
    for count in (MAX_ITEMS + 1, 40_000):

        def batch(_cache: str, count: int = count) -> Request:
            return pb.BatchDecodeRequest(items=[pb.DecodeRequest()] * count)

        yield Case(f"BatchDecode of {count}", "BatchDecode", batch, INVALID, "TOO_MANY_ITEMS", "items")

        def forks(_cache: str, count: int = count) -> Request:
            return pb.ForkCachesRequest(forks=[pb.ForkSource()] * count)

        yield Case(f"ForkCaches of {count}", "ForkCaches", forks, INVALID, "TOO_MANY_ITEMS", "forks")
    for name, cache_tokens, count in (
        ("new", 0, MAX_SEQ_LEN + 1),
        ("new and large", 0, 6 * MAX_SEQ_LEN),
        ("extend", len(PROMPT), KV_CAPACITY),
    ):

        def prefill(cache: str, held: int = cache_tokens, count: int = count) -> Request:
            return pb.PrefillRequest(cache_id=cache if held else "", token_ids=[1] * count)

        yield Case(
            f"Prefill {name} too long",
            "Prefill",
            prefill,
            code_pb2.OUT_OF_RANGE,
            "SEQUENCE_TOO_LONG",
            metadata={"wanted_tokens": str(cache_tokens + count), "kv_capacity_tokens": str(KV_CAPACITY)},
        )


def state_cases() -> Iterator[Case]:
    for new_len in (len(PROMPT) + 1, 2**32 - 1):

        def truncate(cache: str, new_len: int = new_len) -> Request:
            return pb.TruncateKVRequest(cache_id=cache, new_len=new_len)

        yield Case(
            f"TruncateKV to {new_len}",
            "TruncateKV",
            truncate,
            code_pb2.OUT_OF_RANGE,
            "TRUNCATE_BEYOND_END",
            metadata={"new_len": str(new_len), "seq_len": str(len(PROMPT))},
        )
    yield Case(
        "Prefill adapter",
        "Prefill",
        lambda _cache: pb.PrefillRequest(token_ids=[1], adapter_id="lora"),
        code_pb2.FAILED_PRECONDITION,
        "UNSUPPORTED_BY_EXECUTOR",
        metadata={"field": "adapter_id"},
    )
    for rpc in ("Prefill", "Decode", "ForwardVerify", "Forward"):
        yield Case(
            f"{rpc} hidden",
            rpc,
            with_output(rpc, types.OutputOptions(hidden=types.HiddenStates())),
            code_pb2.FAILED_PRECONDITION,
            "UNSUPPORTED_BY_EXECUTOR",
            metadata={"field": "output.hidden"},
        )


CASES: list[Case] = [
    *token_cases(),
    *output_cases(),
    *field_cases(),
    *batch_cases(),
    *cache_cases(),
    *size_cases(),
    *state_cases(),
]
