"""The experts of tokens through a real gateway: who gets them, how a scoring replays them, and refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import quire
from numpy.typing import NDArray
from quire.v1 import types_pb2

from tests.expert_routing import given_logprobs, library_experts
from tests.families import settings_of
from tests.gateway_process import GatewayProcess
from tests.model_factory import make_family_model

VOCAB = 97
ERROR = 1e-4  # of log-probabilities in float32: see `float32_losses`
EXPERTS = quire.output_options(experts=True, logprob=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, of which the second one is dense."""
    model_type, settings = settings_of("qwen3_moe")
    return make_family_model(tmp_path_factory.mktemp("moe"), model_type, {**settings, "mlp_only_layers": [1]})


@pytest.fixture(scope="module")
def gateway(model: Path) -> Iterator[GatewayProcess]:
    """In small steps, so that prompts and scorings run in chunks."""
    flags = ["--dtype", "float32", "--kv-pages", "256", "--max-batch-tokens", "16"]
    with GatewayProcess(model=str(model), workers=2, flags=flags) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[quire.Client]:
    with quire.Client(gateway.address) as client:
        yield client
    gateway.assert_pools_are_whole()


def text_of(seed: int, length: int) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(VOCAB) for _ in range(length)]


def ids_of(outputs: list[types_pb2.StepOutput], client: quire.Client) -> NDArray[np.uint8]:
    joined = b"".join(output.experts for output in outputs)
    return np.asarray(quire.expert_ids(joined, client.model_info().model))


def other_experts(tokens: int, seed: int = 0) -> NDArray[np.uint8]:
    """Any: in each of 3 layers, 2 of 6."""
    ranks = np.random.default_rng(seed).random((tokens, 3, 6)).argsort(-1)
    return ranks[..., :2].astype(np.uint8)


def test_a_generation_is_replayed(client: quire.Client, model: Path) -> None:
    """The scoring has its log-probabilities, and the experts are those of the library."""
    info = client.model_info().model
    assert (info.moe_layers, info.num_experts, info.experts_per_token) == (3, 6, 2)
    output = quire.output_options(experts=True, logprob=True, temperature=1.0, seed=5)
    text = text_of(1, 37)
    with client.session() as session, session.prefill(text, output=output) as cache:
        outputs = [cache.output]
        for _ in range(20):  # from the fourth on the worker has them before they are requested
            text.append(outputs[-1].token_id)
            outputs.append(cache.decode(text[-1], output=output))
    assert np.array_equal(ids_of(outputs, client), library_experts(model, text)[36:])
    experts = b"".join(output.experts for output in outputs)
    with client.session() as session:
        scored = session.score(text, score_from=37, output=EXPERTS, experts=experts)
    assert scored.token_logprobs == pytest.approx([output.logprob for output in outputs[:-1]], abs=ERROR)
    assert [output.experts for output in scored.outputs] == [output.experts for output in outputs]


def test_an_execution_returns_those_of_decodes(client: quire.Client) -> None:
    text = text_of(1, 37)
    item = quire.item(text, experts=True, tokens_only=True, max_tokens=8, temperature=1.0, seed=5)
    chunks = list(client.execute([item]))
    output = quire.output_options(experts=True, temperature=1.0, seed=5)
    with client.prefill(text, output=output) as cache:
        outputs = [cache.output, *(cache.decode(chunk.token_ids[0], output=output) for chunk in chunks[:-1])]
    assert [tuple(chunk.experts) for chunk in chunks] == [(each.experts,) for each in outputs]


def test_experts_of_a_prompt_come_from_a_scoring_of_it(client: quire.Client, model: Path) -> None:
    """Whose KV the generation shares, as docs/recipes.md says."""
    prompt = text_of(7, 40)
    outputs = list(client.score(prompt, output=EXPERTS).outputs[:-1])
    with client.prefill(prompt, output=EXPERTS) as cache:
        assert cache.reused_tokens == 32
        outputs.append(cache.output)
        for _ in range(5):
            outputs.append(cache.decode(outputs[-1].token_id, output=EXPERTS))
    text = [*prompt, *(output.token_id for output in outputs[len(prompt) - 1 :])]
    assert np.array_equal(ids_of(outputs, client), library_experts(model, text[:-1]))
    routed = b"".join(output.experts for output in outputs)
    replayed = client.score(text, score_from=len(prompt), experts=routed, experts_from=0)
    generated = [output.logprob for output in outputs[len(prompt) - 1 :]]
    assert replayed.token_logprobs == pytest.approx(generated, abs=ERROR)


def test_other_experts_give_other_numbers(client: quire.Client, model: Path) -> None:
    """Those of the library with them. And no KV is shared with texts that were routed otherwise."""
    text = text_of(2, 50)
    plain = client.score(text, output=EXPERTS)
    given = other_experts(40)
    replayed_logprobs: list[float] = []
    for _ in range(2):
        items = [
            quire.ScoreItem(text, experts=given.tobytes(), experts_from=3),
            quire.ScoreItem(text),
            quire.ScoreItem(text_of(3, 30), output=quire.output_options(logprob=True)),
        ]
        first, second, third = quire.checked(client.score_batch(items, output=EXPERTS))
        used = ids_of(list(first.outputs), client)
        assert np.array_equal(used[3:43], given)
        expected = given_logprobs(model, text, used)
        assert first.token_logprobs == pytest.approx(
            [float(expected[at - 1, text[at]]) for at in range(1, 50)], abs=ERROR
        )
        assert second.token_logprobs == pytest.approx(plain.token_logprobs, abs=ERROR)
        assert np.array_equal(ids_of(list(second.outputs), client), library_experts(model, text))
        assert not any(output.experts for output in third.outputs)
        replayed_logprobs = list(first.token_logprobs)
    replayed = client.score(text, score_from=40, experts=given.tobytes(), experts_from=3)
    assert replayed.token_logprobs == pytest.approx(replayed_logprobs[39:], abs=ERROR)
    with client.prefill(text, output=EXPERTS) as cache:
        assert np.array_equal(ids_of([cache.output], client), library_experts(model, text)[-1:])
        assert cache.output.logprob == pytest.approx(plain.outputs[-1].logprob, abs=ERROR)


@pytest.mark.parametrize(
    ("data", "start", "field"),
    [
        (b"\x00\x01\x02", 0, "experts"),  # not a whole token
        (bytes([0, 1, 2, 3, 4, 5]) * 6, 0, "experts"),  # more tokens than there are
        (bytes([0, 1, 2, 3, 4, 5]), 5, "experts"),  # after the last one
        (bytes([0, 1, 2, 3, 4, 5]), 2**32 - 1, "experts"),
        (bytes([0, 1, 2, 3, 4, 6]), 0, "experts"),  # there are six
        (bytes([0, 1, 2, 3, 4, 5, 255, 1, 2, 3, 4, 5]), 0, "experts"),
        (bytes([0, 1, 2, 3, 5, 5]), 0, "experts"),  # one of them twice
        (b"", 1, "experts_from"),
    ],
)
def test_experts_that_cannot_be_are_refused(
    client: quire.Client, data: bytes, start: int, field: str
) -> None:
    with pytest.raises(quire.InvalidRequest) as refused:
        client.score([1, 2, 3, 4, 5], experts=data, experts_from=start)
    assert refused.value.reason == "BAD_EXPERTS" and refused.value.violations[0][0] == field
