"""The client with Tinker's names, against a real server: what it samples is what Decode and Execute do."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quire import AdapterNotFound, Client, InvalidRequest, output_options, tinker

from tests import talkers
from tests.adapter_factory import make_adapter
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel
from tests.talkers import VOCAB, make_talker
from tests.tcp_proxy import TcpProxy

TIMEOUT_S = 60.0
CONTEXT = 120
# The model's end token.
END = 299
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
COUNT = 12
INPUT = tinker.ModelInput.from_ints(PROMPT)
# Logits and log-probabilities are below 64 here, where a rounding in float32 is at most 2**-19. Two ways to a
# log-probability under a temperature each divide, subtract the largest, sum and take a logarithm.
ROUNDING = 8 * 2.0**-19


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    spec = TinyModel(vocab_size=VOCAB, max_positions=CONTEXT)
    model = make_talker(made / "talker", spec, eos_token_id=[END])
    make_adapter(made / "adapters" / "poet", model, 1)
    return made


@pytest.fixture(scope="module")
def gateway(directory: Path) -> Iterator[GatewayProcess]:
    flags = ["--dtype", "float32", "--kv-pages", "512", "--adapters", str(directory / "adapters")]
    with GatewayProcess(model=str(directory / "talker"), flags=flags) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[Client]:
    with Client(gateway.address, timeout_s=TIMEOUT_S) as client:
        yield client


@pytest.fixture
def service(gateway: GatewayProcess) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=gateway.address, timeout_s=TIMEOUT_S) as service:
        yield service
        # No sample leaves a cache behind.
        gateway.wait_until(lambda: not gateway.status().caches and not gateway.status().operations_in_flight)


@pytest.fixture
def sampling_client(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client()


def params(**settings: Any) -> tinker.SamplingParams:
    return tinker.SamplingParams(**{"max_tokens": COUNT, "seed": 7, **settings})


def one(sampling_client: tinker.SamplingClient, **settings: Any) -> tinker.SampledSequence:
    (sequence,) = sampling_client.sample(INPUT, 1, params(**settings)).result(TIMEOUT_S).sequences
    return sequence


def test_samples_are_those_of_execute(client: Client, service: tinker.ServiceClient) -> None:
    sampling: Any = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": (1 << 64) - 1}
    for adapter_id in ("", "poet"):
        expected: dict[int, list[int]] = {}
        for chunk in client.execute(
            PROMPT, max_tokens=COUNT, n=3, tokens_only=True, adapter_id=adapter_id, **sampling
        ):
            expected.setdefault(chunk.sample, []).extend(chunk.token_ids)
        sampling_client = service.create_sampling_client(model_path=adapter_id or None)
        response = sampling_client.sample(INPUT, 3, params(**sampling)).result(TIMEOUT_S)
        assert [each.tokens for each in response.sequences] == [expected[index] for index in range(3)]
        assert {each.stop_reason for each in response.sequences} == {"length"}
        assert response.prompt_logprobs is None and response.topk_prompt_logprobs is None
        assert len({each.sequence_id for each in response.sequences}) == 3


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_logprobs_are_under_the_distribution_of_the_draw(
    client: Client, sampling_client: tinker.SamplingClient, temperature: float
) -> None:
    sequence = one(sampling_client, temperature=temperature)
    whole = PROMPT + sequence.tokens
    scored = client.score(whole, score_from=len(PROMPT), output=output_options(logits="f32"))
    assert sequence.logprobs is not None and len(sequence.logprobs) == COUNT
    for token_id, logprob, output in zip(sequence.tokens, sequence.logprobs, scored.outputs, strict=False):
        scaled = [logit / temperature for logit in array("f", output.logits.data)]
        assert len(scaled) == VOCAB and max(map(abs, scaled)) < 64
        total = max(scaled) + math.log(math.fsum(math.exp(each - max(scaled)) for each in scaled))
        assert logprob == pytest.approx(scaled[token_id] - total, abs=ROUNDING)


def test_a_greedy_sample_has_the_logprobs_of_the_model(sampling_client: tinker.SamplingClient) -> None:
    """Exactly: the bits of a row depend on its own text alone."""
    sequence = one(sampling_client, temperature=0)
    whole = tinker.ModelInput.from_ints(PROMPT + sequence.tokens)
    computed = sampling_client.compute_logprobs(whole).result(TIMEOUT_S)
    assert computed[len(PROMPT) :] == sequence.logprobs
    response = sampling_client.sample(INPUT, 2, params(temperature=0)).result(TIMEOUT_S)
    assert [each.tokens for each in response.sequences] == [sequence.tokens] * 2


@pytest.mark.parametrize("adapter_id", ["", "poet"])
def test_logprobs_of_the_prompt_are_those_of_a_scoring(
    client: Client, service: tinker.ServiceClient, adapter_id: str
) -> None:
    sampling_client = service.create_sampling_client(model_path=adapter_id)
    scored = client.score(PROMPT, output=output_options(top_logprobs=3), adapter_id=adapter_id)
    expected = [None, *scored.token_logprobs]
    assert sampling_client.compute_logprobs(INPUT).result(TIMEOUT_S) == expected
    response = sampling_client.sample(INPUT, 1, params(), True, 3).result(TIMEOUT_S)
    assert response.prompt_logprobs == expected and response.topk_prompt_logprobs is not None
    first, *rest = response.topk_prompt_logprobs
    tops = [list(zip(each.top.token_ids, each.top.logprobs, strict=True)) for each in scored.outputs]
    assert first is None and rest == tops[:-1]
    response = sampling_client.sample(INPUT, 1, params(), topk_prompt_logprobs=1).result(TIMEOUT_S)
    assert response.prompt_logprobs is None and response.topk_prompt_logprobs is not None
    alone = tinker.ModelInput.from_ints(PROMPT[:1])
    assert sampling_client.compute_logprobs(alone).result(TIMEOUT_S) == [None]


def test_what_ends_a_sample(sampling_client: tinker.SamplingClient) -> None:
    """Compared with samples of the same seeds that nothing ends. Tokens are all about as likely."""
    hot: dict[str, Any] = {"temperature": 9, "max_tokens": 60}
    free = sampling_client.sample(INPUT, 16, params(**hot, stop=[])).result(TIMEOUT_S).sequences
    assert all((len(each.tokens), each.stop_reason) == (60, "length") for each in free)
    tokenizer = sampling_client.get_tokenizer()
    own_end, turn = map(tokenizer.library.token_to_id, (talkers.END, talkers.START))
    assert own_end is not None and turn is not None
    # The configs name one end token, and the tokenizer another.
    model_ends = {END, own_end}
    stops: list[tuple[Any, set[int]]] = [
        (None, model_ends), ([7, 8], {*model_ends, 7, 8}), (talkers.START, {*model_ends, turn}),
    ]  # fmt: skip
    for stop, ends in stops:
        cut = sampling_client.sample(INPUT, 16, params(**hot, stop=stop)).result(TIMEOUT_S).sequences
        for whole, sequence in zip(free, cut, strict=True):
            at = next((at for at, token_id in enumerate(whole.tokens) if token_id in ends), 60)
            assert sequence.tokens == whole.tokens[: at + 1], "the last token is part of the sample"
            assert sequence.stop_reason == ("stop" if at < 60 else "length")
        assert ends <= {each.tokens[-1] for each in cut}
    # A text of two tokens, each of which is one character.
    index, at = next(
        (index, at)
        for index, each in enumerate(free)
        for at in range(30)
        if max(each.tokens[at : at + 2]) < 90 and not model_ends & set(each.tokens[:at])
    )
    tokens = free[index].tokens
    text = tokenizer.decode(tokens[at : at + 2])
    count = next(count for count in range(61) if text in tokenizer.decode(tokens[:count]))
    for stop in (text, ["nowhere", text]):
        found = one(sampling_client, **hot, seed=7 + index, stop=stop)
        assert (found.tokens, found.stop_reason) == (tokens[:count], "stop")


async def test_calls_of_tasks(service: tinker.ServiceClient) -> None:
    sampling_client = await service.create_sampling_client()
    await service.create_sampling_client_async(base_model="talker")
    assert await sampling_client.get_base_model_async() == "talker"
    together = await asyncio.gather(
        *(sampling_client.sample_async(INPUT, 1, params(seed=seed)) for seed in range(40))
    )
    alone = [await sampling_client.sample(INPUT, 1, params(seed=seed)) for seed in range(0, 40, 13)]
    assert [each.sequences[0].tokens for each in together[::13]] == [
        each.sequences[0].tokens for each in alone
    ]
    computed = sampling_client.compute_logprobs(INPUT)
    assert await computed == await computed.coroutine() == await computed.result_async(TIMEOUT_S)
    assert await computed == await sampling_client.compute_logprobs_async(INPUT)


async def test_a_cancelled_sample_leaves_nothing_behind(
    gateway: GatewayProcess, sampling_client: tinker.SamplingClient
) -> None:
    sampled = asyncio.create_task(sampling_client.sample_async(INPUT, 8, params(max_tokens=90, stop=[])))
    while not gateway.status().caches:
        await asyncio.sleep(0.001)
    sampled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampled
    with pytest.raises(TimeoutError):
        await sampling_client.sample(INPUT, 8, params(max_tokens=90, stop=[])).result_async(0)


def test_a_broken_connection_changes_no_token(
    gateway: GatewayProcess, sampling_client: tinker.SamplingClient
) -> None:
    expected = one(sampling_client, max_tokens=90, stop=[])
    with TcpProxy(gateway.address) as proxy:
        settings: Any = {"base_url": proxy.address, "timeout_s": TIMEOUT_S}
        with tinker.ServiceClient(**settings) as service:
            through = service.create_sampling_client().result()
            for _ in range(2):
                future = through.sample(INPUT, 1, params(max_tokens=90, stop=[]))
                gateway.wait_until(lambda: gateway.status().caches > 0)
                proxy.break_connections()
                (sequence,) = future.result(TIMEOUT_S).sequences
                assert (sequence.tokens, sequence.logprobs) == (expected.tokens, expected.logprobs)


def test_errors(service: tinker.ServiceClient, sampling_client: tinker.SamplingClient) -> None:
    with pytest.raises(AdapterNotFound):
        service.create_sampling_client(model_path="prose").sample(INPUT, 1, params()).result(TIMEOUT_S)
    with pytest.raises(InvalidRequest):
        sampling_client.sample(INPUT.append_int(VOCAB), 1, params()).result(TIMEOUT_S)
    with pytest.raises(InvalidRequest):
        sampling_client.sample(tinker.ModelInput.empty(), 1, params()).result(TIMEOUT_S)
    with pytest.raises(tinker.TinkerError, match="temperature"):
        one(sampling_client, temperature=200)
    for count, settings in ((0, {}), (1, {"max_tokens": 0}), (1, {"stop": ""})):
        with pytest.raises(ValueError, match="at least one"):
            sampling_client.sample(INPUT, count, params(**settings)).result(TIMEOUT_S)
    other = service.create_sampling_client(base_model="Qwen/Qwen3-8B")
    for wait in (other.result, other.compute_logprobs(INPUT).result, other.sample(INPUT, 1, params()).result):
        with pytest.raises(ValueError, match="the server has talker, and not Qwen/Qwen3-8B"):
            wait(TIMEOUT_S)
    assert service.create_sampling_client(base_model="talker").result().get_base_model() == "talker"
    with pytest.raises(ValueError, match="printable"):
        tinker.ServiceClient(api_key="two words")


def test_a_closed_connection(gateway: GatewayProcess) -> None:
    service = tinker.ServiceClient(base_url=gateway.address, timeout_s=TIMEOUT_S)
    sampling_client = service.create_sampling_client().result()
    service.close()
    service.close()
    with pytest.raises(RuntimeError, match="closed"):
        sampling_client.sample(INPUT, 1, params())


def test_closing_the_connection_cancels_what_runs(gateway: GatewayProcess, client: Client) -> None:
    """On the server, too, which would keep it for a client that comes back."""
    service = tinker.ServiceClient(base_url=gateway.address, timeout_s=TIMEOUT_S)
    running = service.create_sampling_client().sample(INPUT, 128, params(max_tokens=CONTEXT - len(PROMPT)))
    while not client.status().operations_in_flight:
        pass
    service.close()
    with pytest.raises(CancelledError):
        running.result(TIMEOUT_S)
    assert not client.status().caches


def test_types_of_others_with_the_same_fields(sampling_client: tinker.SamplingClient) -> None:
    """Such as Tinker's own."""
    prompt: Any = SimpleNamespace(to_ints=lambda: PROMPT)
    theirs: Any = SimpleNamespace(**vars(params()))
    (sequence,) = sampling_client.sample(prompt, 1, theirs).result(TIMEOUT_S).sequences
    assert sequence.tokens == one(sampling_client).tokens
    chunks = [tinker.EncodedTextChunk(tokens=PROMPT[:2]), tinker.types.EncodedTextChunk(tokens=PROMPT[2:-1])]
    built = tinker.ModelInput(chunks=chunks).append_int(PROMPT[-1])
    assert (built.to_ints(), built.length, tinker.ModelInput.empty().length) == (PROMPT, len(PROMPT), 0)
    assert tinker.types.SamplingParams is tinker.SamplingParams
