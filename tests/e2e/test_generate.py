"""Generating on a caller's cache through a real gateway: as a loop of Decodes, whatever breaks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
import quire
from quire.v1 import runner_pb2, types_pb2

from tests.e2e.test_execute import PATIENCE_S, VOCAB, sampling_of
from tests.error_details import status_reason
from tests.gateway_process import GatewayProcess


def looped(
    client: quire.Client, prompt: list[int], first: int, count: int, output: types_pb2.OutputOptions
) -> list[types_pb2.StepOutput]:
    """The outputs of one decode after another."""
    outputs: list[types_pb2.StepOutput] = []
    with client.prefill(prompt, output=output) as cache:
        for _ in range(count):
            outputs.append(cache.decode(outputs[-1].token_id if outputs else first))
    return outputs


def length_in(chunk: quire.Chunk) -> int:
    assert chunk.kv_cache is not None
    return chunk.kv_cache.seq_len


def test_what_comes_is_what_a_loop_of_decodes_returns(tiny_gateway: GatewayProcess) -> None:
    rng = random.Random(3)
    with quire.Client(tiny_gateway.address) as client:
        for _ in range(6):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 17, 60]))]
            first, count = rng.randrange(VOCAB), rng.randint(1, 20)
            hidden = types_pb2.HiddenStates(layers=[0, 2])
            output = types_pb2.OutputOptions(
                sampling=sampling_of(rng), top_logprobs=2, logprob=True, hidden=hidden
            )
            outputs = looped(client, prompt, first, count + 2, output)
            with client.prefill(prompt, output=output) as cache:
                settings: dict[str, Any] = {
                    "top_logprobs": 2,
                    "logprobs": True,
                    "hidden": hidden,
                    "ignore_eos": True,
                }
                chunks = list(cache.generate(first, max_tokens=count, **settings))
                assert [c.token_ids for c in chunks] == [(o.token_id,) for o in outputs[:count]]
                for chunk, expected in zip(chunks, outputs, strict=False):
                    assert chunk.logprobs[0].logprob == expected.logprob
                    assert chunk.logprobs[0].top == expected.top
                    assert list(chunk.hidden[0].states) == list(expected.hidden)
                assert chunks[-1].finish_reason == "length"
                assert cache.seq_len == len(prompt) + count == length_in(chunks[-1])
                # A decode goes on where it ends, and it goes on behind that.
                assert cache.decode(cache.output.token_id) == outputs[count]
                (last,) = cache.generate(cache.output.token_id, max_tokens=1, ignore_eos=True)
                assert last.token_ids == (outputs[count + 1].token_id,)


def test_drafts_change_nothing_and_none_is_left_behind_the_end(tiny_gateway: GatewayProcess) -> None:
    with quire.Client(tiny_gateway.address) as client:
        prompt, accepted = [5, 6, 7, 8] * 6, 0
        # Of two tokens a text repeats itself.
        mask = types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=[5, 6]))
        expected = looped(client, prompt, 5, 60, types_pb2.OutputOptions(mask=mask))
        for count in range(40, 61):
            with client.prefill(prompt) as cache:
                chunks = list(
                    cache.generate(
                        5,
                        max_tokens=count,
                        speculation="prompt_lookup",
                        constraint={"mask": mask},
                        ignore_eos=True,
                    )
                )
                tokens = [token for chunk in chunks for token in chunk.token_ids]
                assert tokens == [each.token_id for each in expected[:count]]
                assert cache.refresh() == len(prompt) + count == length_in(chunks[-1])
                assert chunks[-1].usage is not None
                accepted += chunks[-1].usage.accepted_draft_tokens
        assert accepted


def test_who_leaves_has_the_tokens_that_were_read(tiny_gateway: GatewayProcess) -> None:
    async def leave() -> None:
        async with (
            quire.AsyncClient(tiny_gateway.address) as client,
            client.session() as session,
            session.prefill([1, 2, 3]) as cache,
        ):
            read: list[int] = []
            async with cache.generate(5, max_tokens=200, ignore_eos=True) as generation:
                async for chunk in generation:
                    read += chunk.token_ids
                    if len(read) == 7:
                        break
            assert cache.seq_len == 3 + 7 == await cache.refresh()
            assert read == [each.token_id for each in expected[:7]]
            assert (await cache.decode(read[-1])).token_id == expected[7].token_id

    with quire.Client(tiny_gateway.address) as blocking:
        expected = looped(blocking, [1, 2, 3], 5, 8, types_pb2.OutputOptions())
    asyncio.run(leave())


def test_what_ends_it_early(shipped_gateway: GatewayProcess) -> None:
    """A text, a token, the end of a grammar, a token that is not likely or certain enough: several caches."""
    with quire.Client(shipped_gateway.address) as client:
        ids = client.tokenizer()
        prompt = ids.encode("12+34=")
        settings: list[dict[str, Any]] = [
            {"stop": ["6"]},
            {"stop_token_ids": ids.encode("4", special_tokens=False)},
            {"constraint": {"regex": "4[0-9]"}},
            {"min_logprob": 0.0, "max_tokens": 1},
            {"min_logprob": 0.0},
            {"max_entropy": 0.0},
            {"max_entropy": 100.0, "max_tokens": 2},
        ]
        caches = [client.prefill(prompt[:-1]) for _ in settings]
        items = [
            quire.item(cache.prompt(prompt[-1]), item_id=str(index), **each)
            for index, (cache, each) in enumerate(zip(caches, settings, strict=True))
        ]
        last: dict[str, quire.Chunk] = {}
        texts = dict.fromkeys("0123456", "")
        for chunk in client.execute(items):
            last[chunk.item_id] = chunk
            texts[chunk.item_id] += chunk.text
        assert [texts[key] for key in "0123"] == ["4", "", "46", "4"]
        reasons = ["stop", "stop", "stop", "length", "unlikely", "uncertain", "length"]
        assert [last[key].finish_reason for key in "0123456"] == reasons
        for index, cache in enumerate(caches):
            assert cache.refresh() == length_in(last[str(index)])
            cache.release()


def test_samples_on_copies_leave_the_cache(tiny_gateway: GatewayProcess) -> None:
    before = tiny_gateway.status().caches
    with quire.Client(tiny_gateway.address) as client, client.prefill([1, 2, 3]) as cache:
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
        copies: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for chunk in cache.generate(4, n=3, max_tokens=10, **drawn):
            copies[chunk.sample] += chunk.token_ids
        assert cache.seq_len == 3 == cache.refresh()
        for sample, tokens in copies.items():
            sampling = types_pb2.SamplingParams(temperature=1.0, seed=5 + sample)
            output = types_pb2.OutputOptions(sampling=sampling)
            assert tokens == [each.token_id for each in looped(client, [1, 2, 3], 4, 10, output)]
    tiny_gateway.wait_until(lambda: tiny_gateway.status().caches == before)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"adapter_id": "x"}, "BAD_ADAPTER"),
        ({"cache_salt": "x"}, "BAD_CACHE_SALT"),
        ({"min_logprob": 0.5}, "BAD_STOP"),
        ({"max_entropy": -0.5}, "BAD_STOP"),
        ({"max_tokens": 3}, "POSITION_MISMATCH"),
    ],
)
def test_what_is_refused(tiny_gateway: GatewayProcess, settings: dict[str, Any], reason: str) -> None:
    with quire.Client(tiny_gateway.address) as client, client.prefill([1, 2, 3]) as cache:
        cache.seq_len += reason == "POSITION_MISMATCH"
        with pytest.raises(quire.QuireError) as raised:
            list(cache.generate(4, **settings))
        assert raised.value.reason == reason
        for copies in ((0, 0), (0, 2), (2, 0)):
            twice = [quire.item(cache.prompt(1), item_id=f"{at}", n=n) for at, n in enumerate(copies)]
            with pytest.raises(quire.QuireError) as raised:
                list(client.execute(twice))
            assert raised.value.reason == "DUPLICATE_CACHE_IN_BATCH"


@pytest.mark.parametrize("keeps", [False, True], ids=["by position", "by number"])
def test_it_goes_on_after_kills_of_a_worker_and_of_the_gateway(
    tiny_model: Path, tiny_gateway: GatewayProcess, tmp_path: Path, keeps: bool
) -> None:
    """Each token comes once, and is in the cache once."""
    prompt, first, count = [5, 6, 7], 9, 500
    sampling = types_pb2.SamplingParams(temperature=1.0)
    received: list[int] = []

    def request(cache_id: str) -> runner_pb2.ExecuteRequest:
        known = [] if keeps else received
        at = runner_pb2.CachePrompt(
            cache_id=cache_id, position=len(prompt) + len(known), token_ids=[first, *known][-1:]
        )
        item = runner_pb2.ExecuteItem(
            item_id="x", cache=at, max_tokens=count - len(known), sampling=sampling, ignore_eos=True
        )
        made = runner_pb2.ExecuteRequest(items=[item])
        if keeps:
            made.request_id = "generation"
            made.keep.seconds = 600
            made.resume_after.add(item_id="x", position=len(received))
        return made

    def read(responses: Iterable[runner_pb2.ExecuteResponse]) -> runner_pb2.SampleChunk | None:
        last = None
        for response in responses:
            for last in response.chunks:
                assert not last.HasField("error"), status_reason(last.error)
                received.extend(last.token_ids)
        return last

    flags = ["--dtype", "float32", "--kv-pages", "256", "--data-dir", str(tmp_path), "--orphan-grace-s", "0"]
    with GatewayProcess(model=str(tiny_model), workers=2, flags=flags) as gateway:
        with quire.Client(gateway.address) as client:
            cache_id = client.prefill(prompt).detach()
        call = gateway.runner.Execute(request(cache_id), timeout=PATIENCE_S)
        # A response has several tokens.
        read(itertools.islice(call, 3))
        next(iter(gateway.worker_processes())).send_signal(signal.SIGKILL)
        read(itertools.islice(call, 2))
        gateway.process.send_signal(signal.SIGKILL)
        with contextlib.suppress(grpc.RpcError):
            # Some of what was sent does not arrive.
            next(call, None)
        gateway.process.wait(PATIENCE_S)
    with GatewayProcess(model=str(tiny_model), workers=2, flags=flags) as gateway:
        last = read(gateway.runner.Execute(request(cache_id), timeout=PATIENCE_S))
        assert last is not None and last.kv_cache.seq_len == len(prompt) + count
        # The whole of it once more: only if the cache holds just this, it is answered and nothing appended.
        whole, received[:] = [*received], []
        last = read(gateway.runner.Execute(request(cache_id), timeout=PATIENCE_S))
        assert received == whole and len(whole) == count
        assert last is not None and last.kv_cache.seq_len == len(prompt) + count
