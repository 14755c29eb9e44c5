"""Execute through a real gateway: the tokens of a loop of Decodes, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import math
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import quire
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from quire.v1 import admin_pb2, executor_pb2, runner_pb2, types_pb2

from tests.error_details import refused, status_reason
from tests.gateway_process import GatewayProcess

PATIENCE_S = 60
VOCAB = 97
SPECULATION = runner_pb2.Speculation(method=runner_pb2.SPECULATION_METHOD_PROMPT_LOOKUP)
SPECULATIONS = (SPECULATION, runner_pb2.Speculation(method=runner_pb2.SPECULATION_METHOD_DRAFT_MODEL))
Samples = dict[tuple[str, int], list[runner_pb2.SampleChunk]]


def item(item_id: str, prompt: Sequence[int], max_tokens: int, **settings: object) -> runner_pb2.ExecuteItem:
    return runner_pb2.ExecuteItem(
        item_id=item_id,
        tokens=runner_pb2.TokenPrompt(token_ids=prompt),
        max_tokens=max_tokens,
        ignore_eos=True,
        **settings,  # type: ignore[arg-type]
    )


def gather(responses: Iterable[runner_pb2.ExecuteResponse]) -> Samples:
    """Chunks by sample, each sample whole and in order."""
    found: Samples = defaultdict(list)
    for response in responses:
        for chunk in response.chunks:
            chunks = found[chunk.item_id, chunk.sample]
            assert not chunks or not chunks[-1].finish_reason, "nothing follows the end"
            assert chunk.position == sum(len(c.token_ids) for c in chunks)
            chunks.append(chunk)
    assert all(chunks[-1].finish_reason for chunks in found.values())
    return found


def tokens(chunks: Sequence[runner_pb2.SampleChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def execute(gateway: GatewayProcess, *items: runner_pb2.ExecuteItem) -> Samples:
    request = runner_pb2.ExecuteRequest(items=items)
    return gather(gateway.runner.Execute(request, timeout=PATIENCE_S))


def driven(
    gateway: GatewayProcess, prompt: Sequence[int], count: int, output: types_pb2.OutputOptions
) -> list[types_pb2.StepOutput]:
    """What a client's own loop of Decodes gets."""
    answer = gateway.prefill(prompt, output=output)
    cache_id, outputs = answer.kv_cache.cache_id, [answer.output]
    for position in range(len(prompt), len(prompt) + count - 1):
        step = gateway.decode(cache_id, outputs[-1].token_id, position=position, output=output)
        outputs.append(step.output)
    gateway.release(cache_id)
    return outputs


def sampling_of(rng: random.Random) -> types_pb2.SamplingParams:
    sampling = types_pb2.SamplingParams(temperature=rng.choice([0.7, 1.5]), seed=rng.randrange(1 << 64))
    if rng.random() < 0.5:
        sampling.top_p = 0.9
    if rng.random() < 0.5:
        sampling.presence_penalty, sampling.frequency_penalty = 0.5, 0.7
    if rng.random() < 0.5:
        sampling.repetition_penalty = 1.3
    if rng.random() < 0.3:
        sampling.logit_bias[rng.randrange(VOCAB)] = 4.0
    return sampling


def test_tokens_are_those_of_a_loop_of_decodes(tiny_gateway: GatewayProcess) -> None:
    rng = random.Random(7)
    before = tiny_gateway.status().caches
    items, loops = [], {}
    for number in range(6):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 17, 70]))]
        count, samples = rng.randint(1, 12), rng.choice([1, 1, 3])
        if speculates := rng.random() < 0.6:
            prompt, count = 2 * prompt, 3 * count
        output = types_pb2.OutputOptions(top_logprobs=2)
        if rng.random() < 0.7:
            output.sampling.CopyFrom(sampling_of(rng))
        made = item(f"item {number}", prompt, count, n=samples, logprobs=True, top_logprobs=2)
        if speculates:
            made.speculation.CopyFrom(rng.choice(SPECULATIONS))
        if output.HasField("sampling"):
            made.sampling.CopyFrom(output.sampling)
        if rng.random() < 0.4:
            made.constraint.mask.allowed.ids.extend(range(5, 40))
            output.mask.allowed.ids.extend(range(5, 40))
        items.append(made)
        for sample in range(samples):
            own = types_pb2.OutputOptions()
            own.CopyFrom(output)
            if own.HasField("sampling"):
                own.sampling.seed = (own.sampling.seed + sample) % (1 << 64)
            loops[made.item_id, sample] = driven(tiny_gateway, prompt, count, own)
    found = execute(tiny_gateway, *items)
    assert found.keys() == loops.keys()
    for key, chunks in found.items():
        assert tokens(chunks) == [output.token_id for output in loops[key]]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        assert [p.logprob for p in logprobs] == pytest.approx([o.logprob for o in loops[key]], abs=1e-5)
        assert [list(p.top.token_ids) for p in logprobs] == [list(o.top.token_ids) for o in loops[key]]
        assert chunks[-1].finish_reason == runner_pb2.FINISH_REASON_LENGTH
        assert chunks[-1].usage.output_tokens == len(loops[key])
    # Drafts were right and wrong: those that are looked up in texts of random weights.
    usages = [chunks[-1].usage for chunks in found.values()]
    accepted = sum(usage.accepted_draft_tokens for usage in usages)
    assert 0 < accepted < sum(usage.draft_tokens for usage in usages)
    assert tiny_gateway.status().caches == before


def test_without_a_draft_model_it_is_refused(shipped_gateway: GatewayProcess) -> None:
    ask = runner_pb2.ExecuteItem(item_id="one", text="12+30=", speculation=SPECULATIONS[1])
    (chunks,) = execute(shipped_gateway, ask).values()
    assert status_reason(chunks[0].error) == "UNSUPPORTED_BY_EXECUTOR"


def test_text_comes_with_its_tokens_and_ends_before_a_stop_text(shipped_gateway: GatewayProcess) -> None:
    hot = types_pb2.SamplingParams(temperature=5, seed=11)
    ask = runner_pb2.ExecuteItem(
        item_id="hot", text="12+30=", sampling=hot, max_tokens=40, n=4, ignore_eos=True
    )
    whole = execute(shipped_gateway, ask)
    texts = {sample: "".join(chunk.text for chunk in chunks) for (_, sample), chunks in whole.items()}
    assert len(set(texts.values())) == 4
    for sample, text in texts.items():
        stop = text[5:7]
        ask.stop[:] = [stop, "never"]
        chunks = execute(shipped_gateway, ask)["hot", sample]
        assert "".join(chunk.text for chunk in chunks) == text[: text.index(stop)]
        assert chunks[-1].finish_reason == runner_pb2.FINISH_REASON_STOP and chunks[-1].stop == stop


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("speculates", [False, True])
def test_neither_bad_words_nor_early_ends(
    shipped_gateway: GatewayProcess, seed: int, *, speculates: bool
) -> None:
    rng = random.Random(seed)
    with quire.Client(shipped_gateway.address) as client:
        encode = client.tokenizer().encode
        end, *_ = client.tokenizer().end_ids
        words = rng.choice([["1", "23"], ["12", "121", "5 "], ["7"], []])
        sequences = [tuple(encode(space + word)) for word in words for space in ("", " ")]
        # One is no token of the model: it never comes.
        at_least, stops, never = rng.choice([0, 3, 20]), [end, encode("9")[0]], 1 << 31
        sampling = types_pb2.SamplingParams(temperature=rng.choice([0, 3]), seed=seed)
        prompt, made = encode("12+30=" * 4), list[int]()
        with contextlib.ExitStack() as held:
            cache = None
            while len(made) < 40 and not (len(made) > at_least and made[-1] in stops):
                output = types_pb2.OutputOptions(sampling=sampling)
                early = stops if len(made) < at_least else []
                bad = [
                    each[-1] for each in sequences if tuple(made[len(made) + 1 - len(each) :]) == each[:-1]
                ]
                for token in (*early, *bad):
                    output.sampling.logit_bias[token] = -math.inf
                if cache is None:
                    cache = held.enter_context(client.prefill(prompt, output=output))
                    made.append(cache.output.token_id)
                else:
                    made.append(cache.decode(made[-1], output=output).token_id)
    ask = item(
        "0",
        prompt,
        40,
        sampling=sampling,
        min_tokens=at_least,
        bad_words=words,
        stop_token_ids=[*stops, never],
    )
    if speculates:
        ask.speculation.CopyFrom(SPECULATION)
    (chunks,) = execute(shipped_gateway, ask).values()
    assert tokens(chunks) == made


def test_a_grammar_of_bad_words_alone_is_refused(shipped_gateway: GatewayProcess) -> None:
    ask = runner_pb2.ExecuteItem(item_id="one", text="12+30=", max_tokens=9, bad_words=["4", "5"])
    ask.constraint.regex = "[45]"
    (chunks,) = execute(shipped_gateway, ask).values()
    assert refused_field(chunks) == ("BAD_MASK", "constraint")
    # A stop text does not end it early, either; and a grammar's end does.
    ask.constraint.regex, ask.min_tokens, ask.stop[:] = "6677", 3, ["7"]
    (chunks,) = execute(shipped_gateway, ask).values()
    assert "".join(chunk.text for chunk in chunks) == "667"
    ask.min_tokens = 8
    (chunks,) = execute(shipped_gateway, ask).values()
    assert "".join(chunk.text for chunk in chunks) == "6677"


def refused_field(chunks: Sequence[runner_pb2.SampleChunk]) -> tuple[str, str]:
    """The reason of a sample's failure, and the field of the item that it names."""
    bad = error_details_pb2.BadRequest()
    any(detail.Unpack(bad) for detail in chunks[-1].error.details)
    return status_reason(chunks[-1].error), bad.field_violations[0].field


def test_rules_that_forbid_all_tokens_name_what_is_wrong(shipped_gateway: GatewayProcess) -> None:
    ask = runner_pb2.ExecuteItem(item_id="one", text="12+30=", max_tokens=9)
    ask.min_tokens, ask.stop_token_ids[:] = 2, range(64)
    (chunks,) = execute(shipped_gateway, ask).values()
    assert refused_field(chunks) == ("BAD_MASK", "min_tokens")
    ask.constraint.mask.allowed.ids[:] = [1, 2]
    (chunks,) = execute(shipped_gateway, ask).values()
    assert refused_field(chunks) == ("BAD_MASK", "constraint.mask")


def test_items_that_are_wrong_fail_alone(shipped_gateway: GatewayProcess) -> None:
    text = "1+1="
    items = {
        "": runner_pb2.ExecuteItem(text=text, max_tokens=3),
        "EMPTY_PROMPT": runner_pb2.ExecuteItem(),
        "EMPTY_TOKENS": runner_pb2.ExecuteItem(tokens=runner_pb2.TokenPrompt()),
        "TOKEN_OUT_OF_VOCAB": runner_pb2.ExecuteItem(tokens=runner_pb2.TokenPrompt(token_ids=[1 << 31])),
        "SEQUENCE_TOO_LONG": runner_pb2.ExecuteItem(tokens=runner_pb2.TokenPrompt(token_ids=[1] * 100_000)),
        "BAD_STOP": runner_pb2.ExecuteItem(text=text, stop=["x" * 257]),
        "TOO_MANY_SAMPLES": runner_pb2.ExecuteItem(text=text, n=(1 << 32) - 1),
        "BAD_SAMPLING": runner_pb2.ExecuteItem(text=text, sampling=types_pb2.SamplingParams(temperature=-1)),
        "NO_CHAT_TEMPLATE": runner_pb2.ExecuteItem(
            chat=runner_pb2.Chat(
                messages=[runner_pb2.ChatMessage(role=runner_pb2.CHAT_ROLE_USER, content="hi")]
            )
        ),
        "BAD_SPECULATION": runner_pb2.ExecuteItem(text=text, speculation=runner_pb2.Speculation()),
        "BAD_MAX_COST": runner_pb2.ExecuteItem(text=text, max_cost_usd=math.nan),
        "BAD_MASK": runner_pb2.ExecuteItem(
            text=text,
            constraint=runner_pb2.Constraint(mask=types_pb2.TokenMask(packed=b"\x01")),
        ),
    }
    for reason, made in items.items():
        made.item_id = reason or "good"
    found = execute(shipped_gateway, *items.values())
    assert {item_id for item_id, _ in found} == {made.item_id for made in items.values()}
    for (item_id, _), chunks in found.items():
        if item_id == "good":
            assert "".join(chunk.text for chunk in chunks) == "2"
        else:
            assert len(chunks) == 1 and status_reason(chunks[0].error) == item_id
    assert len(found) == len(items), "each failure is told once"


def progress(sample: int = 0) -> runner_pb2.SampleProgress:
    return runner_pb2.SampleProgress(item_id="a", sample=sample)


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("EMPTY_BATCH", {"items": []}),
        ("BAD_ITEM_ID", {"items": [runner_pb2.ExecuteItem()]}),
        ("DUPLICATE_ITEM_ID", {"items": [item("a", [1], 1)] * 2}),
        ("RUNTIME_NOT_FOUND", {"runtime": "none"}),
        ("BAD_PRIORITY", {"priority": 9}),
        ("BAD_KEEP", {"keep": duration_pb2.Duration(seconds=1)}),
        ("BAD_KEEP", {"keep": duration_pb2.Duration(seconds=-1), "request_id": "a"}),
        ("BAD_POLICY", {"policy": 9}),
        ("BAD_MAX_COST", {"max_cost_usd": math.nan}),
        ("BAD_RESUME_AFTER", {"resume_after": [progress(sample=1)]}),
        ("BAD_RESUME_AFTER", {"resume_after": [progress()] * 1000}),
        ("TOO_MANY_SAMPLES", {"items": [item(str(n), [1], 1, n=128) for n in range(9)]}),
    ],
)
def test_batches_that_are_wrong_are_refused(
    shipped_gateway: GatewayProcess, reason: str, fields: dict[str, Any]
) -> None:
    request = runner_pb2.ExecuteRequest(**{"items": [item("a", [1], 1)], **fields})
    assert refused(lambda: list(shipped_gateway.runner.Execute(request, timeout=PATIENCE_S))) == reason


def test_a_client_who_goes_leaves_nothing(tiny_gateway: GatewayProcess) -> None:
    before = tiny_gateway.status().caches
    many = [item(str(n), [n, 1, 2], 400, n=2) for n in range(8)]
    call = tiny_gateway.runner.Execute(runner_pb2.ExecuteRequest(items=many), timeout=PATIENCE_S)
    for _ in zip(range(5), call, strict=False):
        pass
    call.cancel()
    tiny_gateway.wait_until(
        lambda: tiny_gateway.status().caches == before and not tiny_gateway.status().operations_in_flight
    )


def test_an_item_whose_time_is_up_ends_alone(tiny_gateway: GatewayProcess) -> None:
    late = item("late", [1, 2], 500, timeout=duration_pb2.Duration(nanos=150_000_000))
    found = execute(tiny_gateway, late, item("other", [3, 4], 20))
    assert len(tokens(found["other", 0])) == 20
    assert status_reason(found["late", 0][-1].error) in ("DEADLINE_PASSED", "OVERLOADED")


def kept(request_id: str, *items: runner_pb2.ExecuteItem) -> runner_pb2.ExecuteRequest:
    return runner_pb2.ExecuteRequest(
        request_id=request_id, items=items, keep=duration_pb2.Duration(seconds=PATIENCE_S)
    )


def end(gateway: GatewayProcess, request: runner_pb2.ExecuteRequest) -> None:
    """Nothing is kept of it: others look whether the gateway's pools are empty."""
    cancel = runner_pb2.CancelExecutionRequest(request_id=request.request_id)
    assert gateway.runner.CancelExecution(cancel, timeout=PATIENCE_S).cancelled


def read_into(seen: Samples, call: Iterable[runner_pb2.ExecuteResponse]) -> None:
    for response in call:
        for chunk in response.chunks:
            seen[chunk.item_id, chunk.sample].append(chunk)


def read_some(call: Iterator[runner_pb2.ExecuteResponse], messages: int) -> Samples:
    found: Samples = defaultdict(list)
    read_into(found, itertools.islice(call, messages))
    return found


def resumed(request: runner_pb2.ExecuteRequest, seen: Samples) -> runner_pb2.ExecuteRequest:
    """Asks for what was not seen."""
    again = runner_pb2.ExecuteRequest()
    again.CopyFrom(request)
    for (item_id, sample), chunks in seen.items():
        again.resume_after.add(item_id=item_id, sample=sample, position=len(tokens(chunks)))
    return again


def go_on(
    gateway: GatewayProcess, request: runner_pb2.ExecuteRequest, seen: Samples
) -> dict[tuple[str, int], list[int]]:
    """Asks again for what was not seen; returns all tokens."""
    again = resumed(request, seen)
    found = {key: tokens(chunks) for key, chunks in seen.items()}
    started = None
    for response in gateway.runner.Execute(again, timeout=PATIENCE_S):
        started = started or response.started
        for chunk in response.chunks:
            own = found.setdefault((chunk.item_id, chunk.sample), [])
            assert chunk.position == len(own), "what was seen does not come again, and nothing is left out"
            assert not chunk.HasField("error"), chunk.error
            own += chunk.token_ids
    assert started is not None and started.request_id == request.request_id
    return found


def long_items() -> list[runner_pb2.ExecuteItem]:
    drawn = types_pb2.SamplingParams(temperature=1.0, seed=5)
    return [
        item("greedy", [5, 6, 7], 80, speculation=SPECULATION),
        item("drawn", list(range(40)), 80, sampling=drawn, speculation=SPECULATIONS[1]),
        item("many", list(range(20)), 60, n=3, sampling=drawn),
    ]


def test_a_client_who_comes_again_goes_on_where_he_was(tiny_gateway: GatewayProcess) -> None:
    whole = {key: tokens(chunks) for key, chunks in execute(tiny_gateway, *long_items()).items()}
    request = kept("again", *long_items())
    call = tiny_gateway.runner.Execute(request, timeout=PATIENCE_S)
    seen = read_some(call, 10)
    call.cancel()
    assert go_on(tiny_gateway, request, seen) == whole
    # Also when all of it has ended.
    assert go_on(tiny_gateway, request, {}) == whole
    other = kept("again", *long_items()[:1])
    reused = refused(lambda: list(tiny_gateway.runner.Execute(other, timeout=PATIENCE_S)))
    assert reused == "REQUEST_ID_REUSED"
    end(tiny_gateway, request)


def test_what_is_kept_can_be_ended(tiny_gateway: GatewayProcess) -> None:
    before = tiny_gateway.status().caches
    request = kept("not wanted", *long_items())
    call = tiny_gateway.runner.Execute(request, timeout=PATIENCE_S)
    seen = read_some(call, 10)
    cancel = runner_pb2.CancelExecutionRequest(request_id="not wanted")
    assert tiny_gateway.runner.CancelExecution(cancel, timeout=PATIENCE_S).cancelled
    # Who reads is told the end of what has not ended.
    read_into(seen, call)
    assert {chunks[-1].finish_reason for chunks in seen.values()} == {runner_pb2.FINISH_REASON_CANCELLED}
    assert not tiny_gateway.runner.CancelExecution(cancel, timeout=PATIENCE_S).cancelled
    tiny_gateway.wait_until(lambda: tiny_gateway.status().caches == before)


@pytest.mark.parametrize("is_kept", [False, True])
def test_caches_that_nobody_can_continue_are_soon_gone_if_the_server_is_killed(
    tiny_gateway: GatewayProcess, is_kept: bool
) -> None:
    """Before, they took places for half an hour, as those that a client may still resume."""
    request = kept("lease", *long_items()) if is_kept else runner_pb2.ExecuteRequest(items=long_items())
    listed, before = executor_pb2.ListCachesRequest(), tiny_gateway.status().caches
    leases_s: list[float] = []
    while not leases_s:
        call = tiny_gateway.runner.Execute(request, timeout=PATIENCE_S)
        next(call)
        handles = tiny_gateway.stub.ListCaches(listed, timeout=PATIENCE_S).kv_caches
        leases_s = [handle.expire_time.ToNanoseconds() / 1e9 - time.time() for handle in handles]
        call.cancel()
    if is_kept:
        end(tiny_gateway, request)
    tiny_gateway.wait_until(lambda: tiny_gateway.status().caches == before)
    assert [lease_s > 600 for lease_s in leases_s] == [is_kept] * len(leases_s)


def test_an_execution_goes_on_after_kills_and_an_orderly_restart(
    tiny_model: Path, tiny_gateway: GatewayProcess, tmp_path: Path
) -> None:
    """A worker and then the gateway are killed; the next gateway is stopped."""
    whole = {key: tokens(chunks) for key, chunks in execute(tiny_gateway, *long_items()).items()}
    flags = ["--dtype", "float32", "--kv-pages", "256", "--max-batch-tokens", "48"]
    flags += ["--draft-model", str(tiny_model)]
    flags += ["--data-dir", str(tmp_path), "--orphan-grace-s", "30", "--drain-grace-s", "0"]
    request = kept("killed", *long_items())
    seen: Samples = defaultdict(list)
    workers: set[psutil.Process] = set()
    try:
        for is_killed in (True, False):
            with GatewayProcess(model=str(tiny_model), workers=2, flags=flags) as gateway:
                workers |= gateway.worker_processes()
                call = gateway.runner.Execute(resumed(request, seen), timeout=PATIENCE_S)
                read_into(seen, itertools.islice(call, 10))
                if is_killed:
                    next(iter(workers)).send_signal(signal.SIGKILL)
                    read_into(seen, itertools.islice(call, 10))
                    workers |= gateway.worker_processes()
                gateway.process.send_signal(signal.SIGKILL if is_killed else signal.SIGTERM)
                # On a busy machine all of it may have been sent before the signal came.
                with contextlib.suppress(grpc.RpcError):
                    read_into(seen, call)
                assert is_killed or call.code() in {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
                gateway.process.wait(PATIENCE_S)
        with GatewayProcess(model=str(tiny_model), workers=2, flags=flags) as gateway:
            workers |= gateway.worker_processes()
            assert go_on(gateway, request, seen) == whole
    finally:
        for worker in workers:
            if worker.is_running():
                worker.kill()


# Ten dollars each.
PROVIDER_ANSWER = (
    b'data: {"choices": [{"index": 0, "delta": {"content": "good"}, "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 10}}\n\ndata: [DONE]\n\n'
)


class Provider(http.server.BaseHTTPRequestHandler):
    """Gives each request the same answer."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(PROVIDER_ANSWER)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def provider_port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Provider) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_budget_outlives_a_killed_server_and_the_file_can_raise_it(
    tmp_path: Path, provider_port: int
) -> None:
    path = tmp_path / "runtimes.toml"

    def write(budget_usd: int) -> None:
        path.write_text(
            f"""
            [runtimes.there]
            dialect = "openai-chat"
            base_url = "http://127.0.0.1:{provider_port}/v1"
            model = "m"
            budget_usd_per_hour = {budget_usd}
            prices.m = {{ input_usd = 0, output_usd = 1e6 }}
            """
        )

    def ask(gateway: GatewayProcess) -> str:
        asked = runner_pb2.ExecuteItem(item_id="a", text="hello", max_tokens=10)
        request = runner_pb2.ExecuteRequest(runtime="there", items=[asked])
        *_, last = gateway.runner.Execute(request, timeout=PATIENCE_S)
        return status_reason(last.chunks[-1].error) if last.chunks[-1].HasField("error") else ""

    write(15)
    flags = ["--runtimes", str(path), "--data-dir", str(tmp_path / "data")]
    with GatewayProcess(model="paged-attention", flags=flags) as gateway:
        assert [ask(gateway), ask(gateway)] == ["", "BUDGET_EXCEEDED"]
        gateway.kill()
    with GatewayProcess(model="paged-attention", flags=flags) as gateway:
        assert ask(gateway) == "BUDGET_EXCEEDED"
        write(25)
        cause = admin_pb2.REBUILD_CAUSE_REMOTE_CONFIG_CHANGE
        rebuild = admin_pb2.RebuildSessionRequest(cause=cause)
        assert gateway.admin.RebuildSession(rebuild, timeout=PATIENCE_S).rebuilt == 1
        assert [ask(gateway), ask(gateway)] == ["", "BUDGET_EXCEEDED"]
