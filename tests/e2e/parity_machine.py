"""A machine of random operations through a real gateway, against transformers.

After every operation the length and the logits of each touched cache are compared with what transformers
computes from the tokens alone; at the end everything is released and every pool has to be whole.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from numpy.typing import NDArray
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from tests.e2e.greedy import decoded
from tests.gateway_process import GatewayProcess
from tests.model_factory import hf_greedy, hf_model
from tests.token_trees import random_tree

VOCAB = 97
MAX_TOKENS = 160
# float32 against float32, in another order of summation. The issue of exactness: under 1e-4.
MAX_RELATIVE_ERROR = 1e-4
LAYER = 1
# More tokens than run in a step of the gateways here.
LARGE_TREE = 56
WITH_LOGITS = types_pb2.OutputOptions(
    logits=types_pb2.DATA_TYPE_F32, hidden=types_pb2.HiddenStates(layers=[LAYER])
)

# Of a text: logits [T, vocabulary], and states [T, width].
Truth: TypeAlias = tuple[NDArray[np.float32], NDArray[np.float32]]

tokens_of = st.integers(0, VOCAB - 1)
# Prompts that start alike, so that pages are found again; and ones that do not.
prompts = st.one_of(
    st.lists(tokens_of, min_size=1, max_size=60),
    st.integers(1, 60).map(lambda n: [(3 * i + 1) % VOCAB for i in range(n)]),
)
picks = st.integers(0, 10_000)


@dataclass
class Held:
    """A cache that the test holds, and what should be in it."""

    cache_id: str
    tokens: list[int]
    # The last append, to be repeated: its base and its request.
    last: tuple[int, list[int]] | None = None


@dataclass
class Harness:
    """What the machine needs; a class attribute, since hypothesis makes the instances."""

    gateway: GatewayProcess
    model: Path


class ParityMachine(RuleBasedStateMachine):
    """Callers' operations in any order."""

    harness: Harness
    phases: Sequence[Phase] = tuple(Phase)
    output = WITH_LOGITS

    def __init__(self) -> None:
        super().__init__()
        self.gateway = self.harness.gateway
        self.held: list[Held] = []

    def pick(self, number: int) -> Held:
        return self.held[number % len(self.held)]

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """What the model says after a text."""
        return hf_greedy(self.harness.model, tokens, count)

    def truths(self, texts: Sequence[list[int]]) -> list[Truth]:
        """What transformers computes after each token of each text: logits, and the states of LAYER."""
        # Later tokens do not matter to earlier ones.
        padded = [text + [0] * (max(map(len, texts)) - len(text)) for text in texts]
        with torch.inference_mode():
            result = hf_model(self.harness.model)(
                torch.tensor(padded), use_cache=False, output_hidden_states=True
            )
        states = result.hidden_states[LAYER]
        return [
            (logits[: len(text)].numpy(), state[: len(text)].numpy())
            for text, logits, state in zip(texts, result.logits, states, strict=True)
        ]

    def check_rows(self, outputs: Sequence[types_pb2.StepOutput], text: list[int] | Truth) -> None:
        """The outputs are those after the last tokens of a text, one for each."""
        (exact,) = self.truths([text]) if isinstance(text, list) else (text,)
        logits, states = (rows[-len(outputs) :] for rows in exact)
        for output, row, state in zip(outputs, logits, states, strict=True):
            self.check_output(output, row, state)

    def check_output(
        self, output: types_pb2.StepOutput, logits: NDArray[np.float32], state: NDArray[np.float32]
    ) -> None:
        for data, exact in ((output.logits.data, logits), (output.hidden[0].data, state)):
            error = np.abs(np.frombuffer(data, dtype="<f4") - exact).max() / np.abs(exact).max()
            assert error < MAX_RELATIVE_ERROR, f"it differs by {error}"
        assert output.token_id == int(np.frombuffer(output.logits.data, dtype="<f4").argmax())

    def check_step(self, held: Held, handle: types_pb2.KvCacheHandle) -> None:
        assert handle.cache_id == held.cache_id
        assert handle.seq_len == len(held.tokens)

    def check_scores(self, answer: Any, tokens: list[int], first: int, truth: Truth | None = None) -> None:
        """The scores are those of the tokens from index `first` on. `truth`: what is known of them."""
        logits = torch.tensor((truth or self.truths([tokens])[0])[0][first - 1 : -1])
        expected = logits.log_softmax(-1)[range(len(tokens) - first), tokens[first:]]
        torch.testing.assert_close(torch.tensor(answer.token_logprobs), expected, rtol=1e-4, atol=1e-4)
        assert list(answer.token_is_argmax) == (logits.argmax(-1) == torch.tensor(tokens[first:])).tolist()

    @precondition(lambda self: len(self.held) < 6)
    @rule(tokens=prompts, score_from=st.none() | st.integers(0, 50))
    def prefill(self, tokens: list[int], score_from: int | None) -> None:
        if score_from is not None:
            score_from %= len(tokens)
        answer = self.gateway.prefill(tokens, output=self.output, score_from=score_from)
        self.check_scores(answer, tokens, len(tokens) if score_from is None else max(1, score_from))
        held = Held(answer.kv_cache.cache_id, list(tokens))
        self.held.append(held)
        self.check_step(held, answer.kv_cache)
        self.check_rows([answer.output], held.tokens)

    @precondition(lambda self: len(self.held) < 5)
    @rule(batch=st.lists(prompts, min_size=2, max_size=3))
    def batch_prefill(self, batch: list[list[int]]) -> None:
        items = [pb.PrefillRequest(token_ids=tokens, output=self.output) for tokens in batch]
        results = self.gateway.stub.BatchPrefill(pb.BatchPrefillRequest(items=items), timeout=30).results
        for tokens, result in zip(batch, results, strict=True):
            held = Held(result.response.kv_cache.cache_id, list(tokens))
            self.held.append(held)
            self.check_step(held, result.response.kv_cache)
            self.check_rows([result.response.output], held.tokens)

    @precondition(lambda self: bool(self.held))
    @rule(number=picks, tokens=prompts, fenced=st.booleans())
    def extend(self, number: int, tokens: list[int], fenced: bool) -> None:
        held = self.pick(number)
        if len(held.tokens) + len(tokens) > MAX_TOKENS:
            return
        position = len(held.tokens)
        answer = self.gateway.prefill(
            tokens, cache_id=held.cache_id, position=position if fenced else None, output=self.output
        )
        held.tokens += tokens
        held.last = (position, list(tokens))
        self.check_step(held, answer.kv_cache)
        self.check_rows([answer.output], held.tokens)

    @precondition(lambda self: bool(self.held))
    @rule(number=picks, token=tokens_of)
    def decode(self, number: int, token: int) -> None:
        held = self.pick(number)
        position = len(held.tokens)
        answer = self.gateway.decode(held.cache_id, token, position=position, output=self.output)
        held.tokens.append(token)
        held.last = (position, [token])
        self.check_step(held, answer.kv_cache)
        self.check_rows([answer.output], held.tokens)

    @precondition(lambda self: any(h.last for h in self.held))
    @rule(number=picks)
    def repeat_last_step(self, number: int) -> None:
        candidates = [held for held in self.held if held.last]
        held = candidates[number % len(candidates)]
        assert held.last is not None
        position, tokens = held.last
        answer = self.gateway.prefill(tokens, cache_id=held.cache_id, position=position, output=self.output)
        self.check_step(held, answer.kv_cache)
        self.check_rows([answer.output], held.tokens[: position + len(tokens)])

    @precondition(lambda self: bool(self.held))
    @rule(tokens=st.lists(tokens_of, min_size=6, max_size=6), bad=st.booleans())
    def batch_decode(self, tokens: list[int], bad: bool) -> None:
        items = [
            pb.DecodeRequest(cache_id=held.cache_id, token_id=token, output=self.output)
            for held, token in zip(self.held, tokens, strict=False)
        ]
        middle = len(items) // 2
        if bad:
            items.insert(middle, pb.DecodeRequest(cache_id="kv_unknown", token_id=1))
        results = list(self.gateway.stub.BatchDecode(pb.BatchDecodeRequest(items=items), timeout=30).results)
        if bad:
            assert results.pop(middle).HasField("error")
        for held, token, result in zip(self.held, tokens, results, strict=False):
            held.last = (len(held.tokens), [token])
            held.tokens.append(token)
            self.check_step(held, result.response.kv_cache)
            self.check_rows([result.response.output], held.tokens)

    @precondition(lambda self: len(self.held) in range(1, 6))
    @rule(number=picks, token=tokens_of, prompt=prompts, chunk=prompts)
    def unified(self, number: int, token: int, prompt: list[int], chunk: list[int]) -> None:
        held = self.pick(number)
        items = [
            pb.UnifiedForwardItem(cache_id=held.cache_id, token_ids=[token], output=self.output),
            pb.UnifiedForwardItem(token_ids=chunk, is_final_chunk=False),
            pb.UnifiedForwardItem(token_ids=prompt, output=self.output),
        ]
        results = self.gateway.stub.UnifiedForward(pb.UnifiedForwardRequest(items=items), timeout=30).results
        held.last = (len(held.tokens), [token])
        held.tokens.append(token)
        answers = [result.response for result in results]
        self.check_rows([answers[0].output], held.tokens)
        assert not answers[1].HasField("output")
        self.check_rows([answers[2].output], prompt)
        self.held.append(Held(answers[2].kv_cache.cache_id, list(prompt)))
        # What a chunk left behind is extended like any other cache.
        started = Held(answers[1].kv_cache.cache_id, list(chunk))
        self.held.append(started)
        self.decode(len(self.held) - 1, token)

    @precondition(lambda self: bool(self.held))
    @rule(
        number=picks,
        drafts=st.lists(tokens_of, min_size=0, max_size=6),
        right=st.integers(0, 6),
        accept=st.booleans(),
    )
    def verify(self, number: int, drafts: list[int], right: int, accept: bool) -> None:
        held = self.pick(number)
        first = held.tokens[0]
        # The first drafts are what the model will say, the rest is chance.
        truth = self.greedy([*held.tokens, first], min(right, len(drafts)))
        fed = [first, *truth, *drafts[len(truth) :]]
        score = len(drafts) % 2 == 0
        mode = types_pb2.VERIFY_ACCEPT_GREEDY if accept else types_pb2.VERIFY_ACCEPT_ALL
        answer = self.gateway.verify(
            held.cache_id, fed, position=len(held.tokens), accept=mode, output=self.output, score=score
        )
        base = list(held.tokens)
        if score:
            self.check_scores(answer, base + fed, len(base) + 1)
        assert len(answer.outputs) == len(fed)
        self.check_rows(answer.outputs, base + fed)
        if accept:
            chosen = [output.token_id for output in answer.outputs]
            kept = next((i for i, d in enumerate(fed[1:]) if d != chosen[i]), len(fed) - 1)
            assert answer.accepted == kept >= len(truth)
        else:
            assert answer.accepted == len(fed) - 1
        held.tokens = base + fed[: answer.accepted + 1]
        held.last = None
        self.check_step(held, answer.kv_cache)

    @precondition(lambda self: bool(self.held))
    @rule(number=picks, seed=picks, size=st.integers(2, 12) | st.just(LARGE_TREE), score=st.booleans())
    def verify_tree(self, number: int, seed: int, size: int, score: bool) -> None:
        held = self.pick(number)
        base, dice = list(held.tokens), random.Random(seed)
        if len(base) + size > MAX_TOKENS:
            return
        truth = self.greedy([*base, base[0]], 4)

        def right(path: Sequence[int]) -> int:
            depth = len(path) - 1
            return truth[depth] if list(path[1:]) == truth[:depth] and depth < 4 else 0

        tree = random_tree(dice, base[0], size, VOCAB, right)
        answer = self.gateway.verify(
            held.cache_id,
            tree.token_ids,
            parents=tree.parents,
            position=len(base),
            accept=types_pb2.VERIFY_ACCEPT_GREEDY,
            output=self.output,
            score=score,
        )
        # Each token on its own path.
        leaves = sorted(set(range(size)) - set(tree.parents))
        texts = [base + tree.path(leaf) for leaf in leaves]
        for leaf, tokens, truths in zip(leaves, texts, self.truths(texts), strict=True):
            path = tree.indexes(leaf)
            self.check_rows([answer.outputs[index] for index in path], truths)
            if score:
                on_path = pb.ForwardVerifyResponse(
                    token_logprobs=[answer.token_logprobs[index - 1] for index in path[1:]],
                    token_is_argmax=[answer.token_is_argmax[index - 1] for index in path[1:]],
                )
                self.check_scores(on_path, tokens, len(base) + 1, truths)
        path = list(answer.accepted_path)
        held.tokens = base + [tree.token_ids[index] for index in path]
        assert tree.indexes(path[-1]) == path
        kept = held.tokens[len(base) + 1 :]
        if len(kept) > len(truth):  # by chance: a large tree has many tokens
            truth = self.greedy([*base, base[0]], len(kept))
        assert kept == truth[: len(kept)]
        said = answer.outputs[path[-1]].token_id
        assert all(tree.parents[at - 1] != path[-1] or tree.token_ids[at] != said for at in range(1, size))
        held.last = None
        self.check_step(held, answer.kv_cache)

    @precondition(lambda self: bool(self.held))
    @rule(number=picks, share=st.floats(0, 1))
    def truncate(self, number: int, share: float) -> None:
        held = self.pick(number)
        new_len = max(1, round(share * len(held.tokens)))
        answer = self.gateway.truncate(held.cache_id, new_len)
        if new_len < len(held.tokens):
            held.last = None
        del held.tokens[new_len:]
        self.check_step(held, answer.kv_cache)

    @precondition(lambda self: len(self.held) in range(1, 5))
    @rule(number=picks, count=st.integers(1, 2), drop_parent=st.booleans())
    def fork(self, number: int, count: int, drop_parent: bool) -> None:
        parent = self.pick(number)
        dropped = [parent.cache_id] if drop_parent else []
        for handle in self.gateway.fork(parent.cache_id, count, release=dropped):
            child = Held(handle.cache_id, list(parent.tokens))
            self.check_step(child, handle)
            self.held.append(child)
        if drop_parent:
            self.held.remove(parent)

    @precondition(lambda self: len(self.held) in range(2, 5))
    @rule(number=picks, counts=st.tuples(st.integers(0, 2), st.integers(0, 2)), drop_first=st.booleans())
    def fork_two(self, number: int, counts: tuple[int, int], drop_first: bool) -> None:
        parents = self.pick(number), self.pick(number + 1)
        request = pb.ForkCachesRequest()
        for parent, count in zip(parents, counts, strict=True):
            request.forks.add(cache_id=parent.cache_id, count=count, position=len(parent.tokens))
        if drop_first:
            request.release.append(parents[0].cache_id)
        results = self.gateway.stub.ForkCaches(request, timeout=30).results
        assert tuple(len(forked.kv_caches) for forked in results) == counts
        for parent, forked in zip(parents, results, strict=True):
            for handle in forked.kv_caches:
                child = Held(handle.cache_id, list(parent.tokens))
                self.check_step(child, handle)
                self.held.append(child)
        if drop_first:
            self.held.remove(parents[0])

    @precondition(lambda self: bool(self.held))
    @rule(number=picks)
    def release(self, number: int) -> None:
        held = self.pick(number)
        self.held.remove(held)
        assert self.gateway.release(held.cache_id)
        assert not self.gateway.release(held.cache_id)

    @rule(tokens=prompts)
    def score(self, tokens: list[int]) -> None:
        answer = self.gateway.forward(tokens, output=self.output)
        assert len(answer.outputs) == len(tokens)
        self.check_rows(answer.outputs, tokens)
        self.check_scores(answer, tokens, 1)

    @rule(context=prompts, choices=st.lists(prompts, min_size=1, max_size=4), output=st.booleans())
    def score_choices(self, context: list[int], choices: list[list[int]], output: bool) -> None:
        items = [
            pb.ForwardRequest(
                token_ids=context + choice,
                score_from=len(context),
                output=self.output if output else None,
            )
            for choice in choices
        ]
        results = self.gateway.stub.BatchForward(pb.BatchForwardRequest(items=items), timeout=30).results
        for choice, result in zip(choices, results, strict=True):
            assert len(result.response.outputs) == len(choice) + 1
            self.check_scores(result.response, context + choice, len(context))
            if output:
                self.check_rows(result.response.outputs, context + choice)

    @precondition(lambda self: bool(self.held))
    @rule(number=picks, count=st.integers(1, 8))
    def say(self, number: int, count: int) -> None:
        """A text, token by token: from some length on the worker computes the next one ahead."""
        held = self.pick(number)
        if len(held.tokens) + count > MAX_TOKENS:
            return
        expected = self.greedy(held.tokens, count + 1)
        for token, following in itertools.pairwise(expected):
            answer = self.gateway.decode(held.cache_id, token, position=len(held.tokens))
            held.last = (len(held.tokens), [token])
            held.tokens.append(token)
            self.check_step(held, answer.kv_cache)
            assert answer.output.token_id == following

    def teardown(self) -> None:
        for held in self.held:
            self.gateway.release(held.cache_id)
        self.gateway.assert_pools_are_whole()


def run_parity_machine(
    gateway: GatewayProcess,
    model: Path,
    *,
    examples: int,
    steps: int,
    machine: type[ParityMachine] = ParityMachine,
) -> None:
    """A machine on one gateway, that serves `model`; the one of this module: in float32."""
    machine.harness = Harness(gateway, model)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            phases=machine.phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def assert_greedy_tokens_match(gateway: GatewayProcess, model: Path) -> None:
    """64 tokens, one Decode after the other, are those that transformers chooses."""
    prompt = [(5 * i + 2) % VOCAB for i in range(37)]
    assert decoded(gateway, prompt, 64) == hf_greedy(model, prompt, 64)
