"""Scores, batches, verifies and options of the client, against a real server with the shipped model."""

from __future__ import annotations

import asyncio
import math
import re
from array import array
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest
import quire
from quire import (
    AsyncClient,
    Client,
    InvalidRequest,
    PrefillItem,
    QuireError,
    ScoreItem,
    _batches,
    draft_from_top,
    expert_ids,
    floats,
    output_options,
    verify_rows,
)
from quire.v1 import executor_pb2, types_pb2

from tests.gateway_process import ROOT, GatewayProcess

# "12+34=", and what the shipped model says behind it: "46" and the end.
PROMPT = [1, 2, 10, 3, 4, 11]
ANSWER = [4, 6, 12]
VOCAB = 16

_Item = TypeVar("_Item")


@pytest.fixture
def gateway(shipped_gateway: GatewayProcess) -> Iterator[GatewayProcess]:
    yield shipped_gateway
    shipped_gateway.assert_pools_are_whole()


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[Client]:
    with Client(gateway.address, timeout_s=60) as connected:
        yield connected


def test_expert_ids_are_decoded_without_a_copy() -> None:
    model = types_pb2.ModelDescription(moe_layers=2, num_experts=256, experts_per_token=3)
    ids: Any = expert_ids(bytes(range(12)), model)
    assert (ids.shape, ids.itemsize, ids[1, 0, 2]) == ((2, 2, 3), 1, 8)
    assert ids.tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    model.num_experts = 257
    ids = expert_ids(bytes([0, 1, 2, 0, 0, 0] * 2), model)
    assert ids.tolist() == [[[256, 2, 0], [256, 2, 0]]]
    for data in (b"", b"\x00" * 11, b"\x00" * 18):
        with pytest.raises(ValueError, match=r"experts|multiple"):
            expert_ids(data, model)
    with pytest.raises(ValueError, match="experts"):
        expert_ids(b"\x00", types_pb2.ModelDescription())


def test_replayed_experts_begin_with_the_first_row_that_scores(client: Client) -> None:
    """Unless they are said to begin elsewhere. The shipped model has none."""
    for score_from, experts_from, sent in ((0, None, 0), (0, 3, 3), (4, None, 3), (4, 1, 1)):
        item = ScoreItem(PROMPT, score_from, experts=b"\x01\x02", experts_from=experts_from)
        request = _batches.forward_request(item)
        assert (request.experts, request.experts_from) == (b"\x01\x02", sent)
    assert not _batches.forward_request(ScoreItem(PROMPT, score_from=4)).experts_from
    with pytest.raises(quire.PreconditionFailed, match="no experts"):
        client.score(PROMPT, experts=b"\x01")


def good(items: list[_Item | QuireError]) -> list[_Item]:
    for item in items:
        if isinstance(item, QuireError):
            raise item
    return [item for item in items if not isinstance(item, QuireError)]


def said(client: Client, tokens: list[int], token: int) -> float:
    """How likely a prefill finds a token behind others."""
    with client.prefill(tokens, output=output_options(logprob_token_ids=[token])) as cache:
        return cache.output.chosen_logprobs[0]


def test_a_score_says_what_steps_say(client: Client) -> None:
    text = [*PROMPT, *ANSWER]
    scored = client.score(text, score_from=len(PROMPT))
    truth = [said(client, text[:at], text[at]) for at in range(len(PROMPT), len(text))]
    assert scored.token_logprobs == pytest.approx(truth, abs=0.05)
    assert scored.is_greedy and scored.token_is_argmax == (True, True, True)
    assert scored.logprob == pytest.approx(sum(truth), abs=0.1)
    assert [output.token_id for output in scored.outputs][:3] == ANSWER
    whole = client.score(text)
    assert len(whole.token_logprobs) == len(text) - 1 and len(whole.outputs) == len(text)
    assert whole.token_logprobs[-3:] == pytest.approx(scored.token_logprobs, abs=0.05)
    raw = client.forward(text, score_from=len(PROMPT))
    assert tuple(raw.token_logprobs) == pytest.approx(scored.token_logprobs, abs=0.05)


def test_a_batch_of_scores_and_one_that_fails(client: Client) -> None:
    right = ScoreItem([*PROMPT, *ANSWER], score_from=len(PROMPT))
    wrong = ScoreItem([*PROMPT, 4, 7, 12], len(PROMPT), output=output_options(top_logprobs=3))
    first, second, bad, plain = client.score_batch(
        [right, wrong, [], PROMPT], output=output_options(logprob=True)
    )
    assert isinstance(bad, InvalidRequest)
    (one, other, whole) = good([first, second, plain])
    assert one.logprob > other.logprob and one.is_greedy and not other.is_greedy
    assert one.outputs[0].HasField("logprob") and not one.outputs[0].HasField("top")
    assert len(other.outputs[0].top.token_ids) == 3
    assert len(whole.token_logprobs) == len(PROMPT) - 1


def test_prefill_and_extend_score(client: Client) -> None:
    text = [*PROMPT, *ANSWER]
    truth = client.score(text).token_logprobs
    with client.prefill(text, score_from=len(PROMPT)) as cache:
        assert list(cache.token_logprobs) == pytest.approx(truth[-3:], abs=0.05)
        assert list(cache.token_is_argmax) == [True] * 3
        cache.decode(1)
        assert list(cache.token_logprobs) == list(cache.token_is_argmax) == []
    with client.prefill(PROMPT) as cache:
        assert list(cache.token_logprobs) == []
        cache.extend(ANSWER, score_from=1)
        assert list(cache.token_logprobs) == pytest.approx(truth[-2:], abs=0.05)


def test_a_batch_of_prefills_has_options_of_its_own(client: Client) -> None:
    default = output_options(logprob=True)
    own = PrefillItem(PROMPT, output=output_options(top_logprobs=2), cache_salt="s", score_from=3)
    plain, bad, other = client.batch_prefill([PROMPT, [], own], output=default)
    assert isinstance(bad, InvalidRequest)
    caches = good([plain, other])
    assert [cache.output.token_id for cache in caches] == [4, 4]
    assert [cache.output.HasField("top") for cache in caches] == [False, True]
    assert caches[0].output.HasField("logprob") and len(caches[1].token_logprobs) == 3
    forced = output_options(allowed=[7])
    outputs = good(client.batch_decode([(caches[0], 4), (caches[1], 4, forced)], output=default))
    assert [output.token_id for output in outputs] == [6, 7]
    # Made there: both make their calls there.
    assert [cache.decode(6).token_id for cache in caches] == [12, 12]
    assert all(cache.release() for cache in caches)


def test_a_fork_releases_in_the_same_call(client: Client) -> None:
    cache, other = good(client.batch_prefill([PROMPT, PROMPT]))
    left, right = cache.fork(2, release=[cache, other])
    assert not cache.release() and not other.release()
    assert left.decode(4).token_id == 6
    assert right.fork(0, release=[left, right]) == []
    assert not right.release()


def test_a_verify_scores_its_drafts(client: Client) -> None:
    truth = client.score([*PROMPT, 4, 6, 1]).token_logprobs[-2:]
    with client.prefill(PROMPT) as cache:
        verified = cache.verify([4, 6, 1], score=True)
        assert verified.accepted == 1 and verified.token_is_argmax == (True, False)
        assert verified.token_logprobs == pytest.approx(truth, abs=0.05)
    with client.prefill(PROMPT) as cache:
        assert cache.verify([4, 6]).token_logprobs == ()


def test_each_position_of_a_verify_has_its_own_mask(client: Client) -> None:
    with client.prefill(PROMPT) as cache:
        packed = bytes([0b1000, 0])  # Token 3 alone.
        verified = cache.verify([4, 3, 9], rows=verify_rows(masks=[packed, [9], None]))
        assert [output.token_id for output in verified.outputs[:2]] == [3, 9]
        assert verified.accepted == 2


def dense(at: int) -> array[float]:
    return array("f", [1.0 if token == at else 0.0 for token in range(VOCAB)])


@pytest.mark.parametrize(
    "drawn",
    [
        lambda token: {token: 1.0},
        lambda token: [(token, 1.0)],
        lambda token: dense(token).tobytes(),
        dense,
        lambda token: draft_from_top(types_pb2.TopLogprobs(token_ids=[token, 5], logprobs=[-0.1, -2]), 0),
    ],
)
def test_what_drafts_were_drawn_from(client: Client, drawn: object) -> None:
    """Of a server that is certain of what follows, one draft is always kept and the other never."""
    assert callable(drawn)
    output = output_options(temperature=0.7, top_k=1, seed=3)
    with client.prefill(PROMPT) as cache:
        rows = verify_rows([drawn(6), drawn(1)])
        verified = cache.verify([4, 6, 1], output=output, accept="speculative", rows=rows)
    assert (verified.accepted, verified.outputs[1].token_id) == (1, 12)


def test_a_draft_out_of_the_answer_that_drew_it(client: Client) -> None:
    top = types_pb2.TopLogprobs(token_ids=[3, 9], logprobs=[math.log(0.6), math.log(0.2)])
    told = draft_from_top(top, 0.5)
    assert list(told.token_ids) == [3, 9]
    assert list(told.probabilities) == pytest.approx([0.9, 0.1])
    output = output_options(temperature=0.5, top_k=4, top_logprobs=4, sampled_logprob=True, seed=1)
    with client.prefill(PROMPT, output=output) as cache:
        drawn = draft_from_top(cache.output.top, 0.5)
        at = list(drawn.token_ids).index(cache.output.token_id)
        assert math.log(drawn.probabilities[at]) == pytest.approx(cache.output.sampled_logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"temprature": 1},
            TypeError,
            "no setting temprature: there are logprob, .*top_logprobs, .*hidden, .*temperature, top_k",
        ),
        ({"temperature": "hot"}, TypeError, "temperature: "),
        ({"top_k": -1}, ValueError, "top_k: "),
        ({"top_k": 1.5}, TypeError, "top_k: "),
        ({"seed": 1 << 64, "top_k": 1}, ValueError, "seed: "),
        ({"logit_bias": {"a": 1}}, TypeError, "logit_bias: "),
        ({"penalty_from": -1}, ValueError, "penalty_from: "),
        ({"top_logprobs": -1}, ValueError, "-1"),
        ({"top_logprobs": "many"}, TypeError, "str"),
        ({"logits": "f64"}, ValueError, "one of f32, bf16, f16"),
        ({"hidden_format": "f64"}, ValueError, "one of f32, bf16, f16"),
        ({"sampling": {"top_k": 1}}, TypeError, "SamplingParams"),
    ],
)
def test_a_wrong_option_is_an_error_of_a_kind(options: Any, error: type[Exception], says: str) -> None:
    """A name or a type: TypeError. A number that the field cannot have, or an unknown format: ValueError."""
    with pytest.raises(error, match=says) as caught:
        output_options(**options)
    assert type(caught.value) is error


def test_options_from_keywords(client: Client) -> None:
    settings = types_pb2.SamplingParams(temperature=0.6, top_p=0.9)
    output = output_options(logits="bf16", sampling=settings, temperature=0.0, top_k=None, seed=5)
    assert output.logits == types_pb2.DATA_TYPE_BF16
    assert (output.sampling.temperature, output.sampling.seed) == (0.0, 5)
    assert output_options(penalty_from=3).sampling.penalty_from == 3
    assert output.sampling.top_p == pytest.approx(0.9) and not output.sampling.HasField("top_k")
    assert settings.temperature == pytest.approx(0.6), "what was given is left as it was"
    assert output_options() == types_pb2.OutputOptions()
    with client.prefill(PROMPT, output=output_options(logits="f32", allowed=[9])) as cache:
        assert cache.output.token_id == 9 and list(cache.output.logits.shape) == [VOCAB]


def test_embeddings_of_a_batch_of_texts(client: Client) -> None:
    """What the documents say: Prefill with hidden states. The last ones are what logits are computed from."""
    output = output_options(hidden=True)
    caches = good(client.batch_prefill([PROMPT, PROMPT[:3], PROMPT], output=output))
    rows = [floats(cache.output.hidden[0]) for cache in caches]
    assert len(rows[0]) == client.model_info().model.hidden_size
    assert rows[0] == pytest.approx(rows[2], abs=1e-3) and rows[0] != pytest.approx(rows[1], abs=1e-1)
    verified = caches[1].verify(PROMPT[3:], output=output)
    assert floats(verified.outputs[-1].hidden[0]) == pytest.approx(rows[0], abs=5e-2)
    for cache in caches:
        cache.release()
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    codes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = (each for each in codes if "embedding" in each)
    names = {"client": client, "tokens": PROMPT, "quire": quire, "output_options": output_options}
    exec(code, names)
    assert names["embedding"] == pytest.approx(rows[0], abs=1e-3)


async def test_a_batch_of_prefills_that_is_given_up_leaves_no_cache(gateway: GatewayProcess) -> None:
    async with AsyncClient(gateway.address, timeout_s=60) as client:
        given_up = 0
        for moment in range(60):
            async with client.session() as session:
                task = asyncio.create_task(session.batch_prefill([PROMPT, [1], PROMPT[:3]]))
                await asyncio.sleep(moment * 2e-4)
                task.cancel()
                try:
                    for cache in good(await task):
                        await cache.release()
                except asyncio.CancelledError:
                    given_up += 1
        assert given_up
        assert not (await client.stub.ListCaches(executor_pb2.ListCachesRequest())).kv_caches


def test_a_tree_of_drafts(client: Client) -> None:
    """One path says 46; the other tokens are wrong."""
    tokens, parents = [ANSWER[0], 7, ANSWER[1], 8, ANSWER[2]], [0, 0, 1, 2]
    with client.prefill(PROMPT) as cache:
        found = cache.verify(tokens, parents=parents)
        assert (found.accepted, found.path, cache.seq_len) == (2, (0, 2, 4), len(PROMPT) + 3)
        assert cache.output == found.outputs[4]
    with client.prefill(PROMPT) as cache:
        assert cache.verify(ANSWER).path == (0, 1, 2), "of a chain it is all that was accepted"
