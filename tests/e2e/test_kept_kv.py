"""Weights replaced in place, and caches go on with the KV that they have, as trainers update in flight."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quire import Client
from quire.v1 import admin_pb2
from quire.v1 import executor_pb2 as pb

from tests.e2e.greedy import PROMPT, Text
from tests.e2e.test_replace_weights import replace, serve
from tests.gateway_process import GatewayProcess
from tests.model_factory import hf_greedy, hf_model
from tests.recurrent import RECURRENT
from tests.tiny_types import randomise, tiny_model

PATIENCE_S = 60
STEPS = 8
KEEP_KV = admin_pb2.PREVIOUS_CACHES_KEEP_KV


class Reference:
    """A text in transformers, whose tokens are computed with several weights, over the KV that there is."""

    def __init__(self, directory: Path, computed: list[int]) -> None:
        self._models = {directory: hf_model(directory)}
        computing = self._models[directory](torch.tensor([computed]), use_cache=True)
        self._past = computing.past_key_values

    def decode(self, directory: Path, token: int, count: int = 1) -> list[int]:
        """The tokens that follow."""
        model, chosen = self._models.setdefault(directory, hf_model(directory)), []
        with torch.inference_mode():
            for _ in range(count):
                result = model(torch.tensor([[token]]), past_key_values=self._past, use_cache=True)
                chosen.append(token := int(result.logits[0, -1].argmax()))
        return chosen


@pytest.fixture
def gateway(models: list[Path]) -> Iterator[GatewayProcess]:
    with serve(models[0]) as gateway:
        yield gateway
        gateway.assert_pools_are_whole()


def test_caches_continue_with_the_kv_that_they_have(gateway: GatewayProcess, models: list[Path]) -> None:
    """It is that of the old weights, and is shared with forks only. What a worker loses is computed anew."""
    text, lost = Text(gateway), Text(gateway)
    # Longer than a page, so that it could be shared.
    text.decode(2 * STEPS)
    lost.decode(2 * STEPS)
    first, said = text.weights, list(text.tokens)
    computed = [*text.prompt, *said[:-1]]
    (fork,) = gateway.fork(text.cache_id)
    replace(gateway, models[1], KEEP_KV)
    kept = Reference(models[0], computed).decode(models[1], said[-1], STEPS)
    recomputed = hf_greedy(models[1], [*computed, said[-1]], STEPS)
    assert kept != recomputed, "the weights differ enough"
    text.decode(STEPS)
    assert text.tokens == [*said, *kept]
    assert (text.weights, text.replayed_tokens) == (first + 1, 0)
    fresh = gateway.prefill([*computed, said[-1]])
    assert (fresh.reused_tokens, fresh.output.token_id) == (0, recomputed[0])
    branch = Text(gateway)
    branch.release()
    branch.cache_id, branch.tokens = fork.cache_id, list(said)
    branch.decode(STEPS)
    assert branch.tokens == text.tokens and branch.replayed_tokens == 0
    os.kill(gateway.status().workers[0].pid, signal.SIGKILL)
    lost.decode(STEPS)
    assert lost.tokens == [*said, *recomputed] and lost.replayed_tokens >= len(computed)
    for each in (text, branch, lost):
        each.release()
    gateway.release(fresh.kv_cache.cache_id)


def test_recurrent_states_are_kept_too(tmp_path: Path) -> None:
    kind = "granitemoehybrid"
    models = [tmp_path / "old", tmp_path / "new"]
    for seed, directory in enumerate(models):
        model = tiny_model(kind, **RECURRENT[kind])
        randomise(model, seed)
        model.save_pretrained(directory)
    text = [(3 * i + 1) % 97 for i in range(100)]
    kept = Reference(models[0], text).decode(models[1], 5, STEPS)
    assert kept != hf_greedy(models[1], [*text, 5], STEPS), "the weights differ enough"
    with serve(models[0]) as gateway, Client(gateway.address, timeout_s=PATIENCE_S) as client:
        cache = client.prefill(text)
        client.load_weights(str(models[1]), keep_kv=True)
        said, last = list[int](), 5
        while len(said) < STEPS:
            said.append(last := cache.decode(last).token_id)
            assert cache.replayed_tokens == 0
    assert said == kept


def test_callers_under_way_keep_their_kv(models: list[Path]) -> None:
    """Each token is of the weights that its answer names, over the KV of those of the tokens before it."""
    with serve(models[0], workers=2) as gateway:
        texts = [Text(gateway) for _ in range(4)]
        references = [Reference(models[0], text.prompt) for text in texts]
        for turn in range(1, 4):
            calls = []
            for text in texts:
                request = pb.DecodeRequest(cache_id=text.cache_id, token_id=text.tokens[-1])
                calls.append(gateway.stub.Decode.future(request, timeout=PATIENCE_S))
            replace(gateway, models[turn % 3], KEEP_KV)
            for text, reference, call in zip(texts, references, calls, strict=True):
                answer = call.result()
                its = models[answer.kv_cache.weights_version % 3]
                assert [answer.output.token_id] == reference.decode(its, text.tokens[-1])
                assert answer.replayed_tokens == 0
                text.tokens.append(answer.output.token_id)


def sampled_during_a_load(client: Client, source: Path) -> tuple[list[int], list[int]]:
    """The tokens of a sample and versions of their weights; up to some of the new ones if it meets them."""
    tokens, versions, loaded = list[int](), list[int](), 0
    # Several long samples, to be under way for longer than a load takes.
    with client.execute([PROMPT], n=16, ignore_eos=True, tokens_only=True) as texts:
        for chunk in texts:
            if chunk.sample or not chunk.token_ids:
                continue
            if not tokens:
                loaded = client.load_weights(str(source), keep_kv=True).weights_version
            assert chunk.weights_version is not None
            tokens += chunk.token_ids
            versions += [chunk.weights_version] * len(chunk.token_ids)
            if versions[-STEPS:] == [loaded] * STEPS:
                break
    return tokens, versions


def test_samples_under_way_say_which_weights_their_tokens_are_of(models: list[Path]) -> None:
    with serve(models[0], "--kv-pages", "1024") as gateway, Client(gateway.address) as client:
        before, loads, tokens, versions = models[0], 0, list[int](), list[int]()
        # On a busy machine the samples may end before the weights are there.
        while loads not in versions or not loads:
            before, loads = models[loads % 3], loads + 1
            tokens, versions = sampled_during_a_load(client, models[loads % 3])
    old = versions.index(loads)
    assert old and versions == [loads - 1] * old + [loads] * (len(versions) - old)
    assert tokens[:1] == hf_greedy(before, PROMPT, 1)
    reference = Reference(before, PROMPT)
    for last, token, version in zip(tokens, tokens[1:], versions[1:], strict=False):
        assert reference.decode(models[version % 3], last) == [token]
