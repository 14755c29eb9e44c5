"""Verifies of token trees: draws, acceptance, repetition and what is cut. parity_machine.py has the rest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from tests.e2e.conftest import NewCache
from tests.gateway_process import GatewayProcess
from tests.model_factory import hf_greedy, hf_logits
from tests.token_trees import Tree, random_tree

VOCAB = 97
GREEDY, SAMPLED = types_pb2.VERIFY_ACCEPT_GREEDY, types_pb2.VERIFY_ACCEPT_SAMPLED
SPECULATIVE = types_pb2.VERIFY_ACCEPT_SPECULATIVE


def verify(gateway: GatewayProcess, cache_id: str, tree: Tree, **fields: Any) -> pb.ForwardVerifyResponse:
    return gateway.verify(cache_id, tree.token_ids, parents=tree.parents, **{"accept": GREEDY} | fields)


@pytest.mark.parametrize("seed", range(2))
def test_sampled_acceptance_makes_the_draws_of_a_plain_loop(
    tiny_gateway: GatewayProcess, new_cache: NewCache, seed: int
) -> None:
    """With penalties, whose counts are of each token's own path."""
    dice = random.Random(seed)
    prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 40))]
    sampling = types_pb2.SamplingParams(
        temperature=1.2,
        top_p=0.95,
        seed=seed,
        repetition_penalty=1.3,
        typical_p=0.9,
        frequency_penalty=0.4,
        penalty_from=max(0, len(prompt) - 3),
    )
    output = types_pb2.OutputOptions(sampling=sampling, sampled_logprob=True)
    plain, tokens, likely = new_cache(prompt), [dice.randrange(VOCAB)], []
    for _ in range(30):
        drawn = tiny_gateway.decode(plain, tokens[-1], output=output).output
        tokens.append(drawn.token_id)
        likely.append(drawn.sampled_logprob)
    cache_id, at = new_cache(prompt), 0

    def right(path: Sequence[int]) -> int:
        end = at + len(path)
        return tokens[end] if list(path) == tokens[at:end] and end < len(tokens) else 3

    while at < 20:
        tree = random_tree(dice, tokens[at], dice.choice([3, 10, 20]), VOCAB, right)
        answer = verify(tiny_gateway, cache_id, tree, accept=SAMPLED, output=output)
        for index in answer.accepted_path:
            assert tree.token_ids[index] == tokens[at]
            assert answer.outputs[index].token_id == tokens[at + 1]
            assert answer.outputs[index].sampled_logprob == pytest.approx(likely[at], abs=1e-3)
            at += 1
            if at == 30:
                return


def test_a_chain_may_be_said_as_a_tree(tiny_gateway: GatewayProcess, new_cache: NewCache) -> None:
    """Also speculatively: draws and answers are those of a request without parents."""
    flat = types_pb2.VerifyRow(
        draft=types_pb2.DraftProbabilities(token_ids=range(VOCAB), probabilities=[1 / VOCAB] * VOCAB)
    )
    for seed in range(10):
        sampling = types_pb2.SamplingParams(temperature=3.0, seed=seed)
        tokens = [random.Random(f"{seed} {at}").randrange(VOCAB) for at in range(5)]
        said = []
        for parents in (list[int](), [0, 1, 2, 3]):
            answer = tiny_gateway.verify(
                new_cache([1, 2, 3]),
                tokens,
                parents=parents,
                accept=SPECULATIVE,
                rows=[flat] * 4 + [types_pb2.VerifyRow()],
                output=types_pb2.OutputOptions(sampling=sampling),
            )
            assert list(answer.accepted_path) == list(range(1 + answer.accepted) if parents else [])
            said.append((answer.accepted, [row.token_id for row in answer.outputs]))
        assert said[0] == said[1]


@pytest.mark.parametrize("with_logits", [False, True], ids=["from memory", "computed again"])
def test_a_repeated_tree_has_the_same_answer(
    tiny_gateway: GatewayProcess, tiny_model: Path, new_cache: NewCache, *, with_logits: bool
) -> None:
    prompt = [5, 9, 2, 40]
    cache_id, truth = new_cache(prompt), hf_greedy(tiny_model, prompt, 3)
    tree = Tree([truth[0], 11, truth[1], 12, truth[2]], [0, 0, 2, 2])
    fields: dict[str, Any] = {"position": 4}
    if with_logits:
        fields["output"] = types_pb2.OutputOptions(logits=types_pb2.DATA_TYPE_F32)
    first, again = (verify(tiny_gateway, cache_id, tree, **fields) for _ in range(2))
    assert list(first.accepted_path) == list(again.accepted_path) == [0, 2, 4]
    assert first.kv_cache.seq_len == again.kv_cache.seq_len == 7
    assert [row.token_id for row in first.outputs] == [row.token_id for row in again.outputs]
    # With other parents it is another request, which is late.
    with pytest.raises(grpc.RpcError, match="position is 4, but the cache has 7 tokens"):
        verify(tiny_gateway, cache_id, Tree(tree.token_ids, [0, 1, 2, 3]), **fields)


def test_what_is_cut_is_not_found_by_others(
    tiny_gateway: GatewayProcess, tiny_model: Path, new_cache: NewCache
) -> None:
    """Full pages of a tree in its own order, and of the path that is kept: only those are shared."""
    prompt = [7] * 8
    truth = hf_greedy(tiny_model, prompt, 30)
    token_ids, parents, at = [truth[0]], [], 0
    for token in truth[1:25]:
        token_ids += [(token + 1) % VOCAB, token]
        parents += [at, at]
        at = len(token_ids) - 1
    answer = verify(tiny_gateway, new_cache(prompt), Tree(token_ids, parents))
    assert answer.accepted == 24
    kept = [*prompt, *truth[:25]]
    for tokens in (kept, [*prompt, *token_ids]):
        found = tiny_gateway.prefill(
            [*tokens, 1], output=types_pb2.OutputOptions(logits=types_pb2.DATA_TYPE_F32)
        )
        exact = hf_logits(tiny_model, [*tokens, 1])[-1]
        said = torch.frombuffer(bytearray(found.output.logits.data), dtype=torch.float32)
        assert torch.allclose(said, exact, atol=1e-4, rtol=1e-4)
        tiny_gateway.release(found.kv_cache.cache_id)
