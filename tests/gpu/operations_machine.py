"""Random sequences of an executor's operations, for test_operations.py; alone, since it needs hypothesis.

After each operation the pool is walked; at the end everything is released and every page is back.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from benchmarks.in_process import LlmExecutor
from tests.gpu.oracle import Oracle
from tests.gpu.sizes import sized
from tests.gpu.test_executor import MAX_RELATIVE_ERROR, WITH_LOGITS
from tests.model_factory import TinyModel
from workers.executors.memory import StepLimits
from workers.operations import Accept, RowOutput

MODEL = TinyModel(head_dim=64)
VOCAB = MODEL.vocab_size
MAX_TOKENS = 160
MOST_HELD = 6
# Few enough that pages which nobody refers to are given to others.
PAGES = 96

tokens_of = st.integers(0, VOCAB - 1)
# Prompts that begin alike, so that pages are found again; and ones that do not.
prompts = st.one_of(
    st.lists(tokens_of, min_size=1, max_size=60),
    st.integers(1, 60).map(lambda n: [(3 * i + 1) % VOCAB for i in range(n)]),
)
picks = st.integers(0, 10_000)


@dataclass
class Held:
    """A sequence, and what should be in it."""

    key: int
    tokens: list[int]


class OperationsMachine(RuleBasedStateMachine):
    """Operations in any order. What is set on the class is so because hypothesis makes the instances."""

    executor: ClassVar[LlmExecutor]
    oracle: ClassVar[Oracle]

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []
        self.next_key = 0

    def new(self, tokens: list[int]) -> Held:
        self.next_key += 1
        self.held.append(Held(self.next_key, list(tokens)))
        return self.held[-1]

    def pick(self, number: int) -> Held:
        return self.held[number % len(self.held)]

    def check(self, output: RowOutput, tokens: list[int]) -> None:
        expected = self.oracle.logits(tokens)[-1].numpy()
        actual = np.frombuffer(output.logits or b"", dtype="<f4")
        error = np.abs(actual - expected).max() / np.abs(expected).max()
        assert error < MAX_RELATIVE_ERROR, f"logits differ by {error} after {len(tokens)} tokens"
        assert output.token_id == int(actual.argmax())

    @precondition(lambda self: len(self.held) < MOST_HELD - 1)
    @rule(batch=st.lists(prompts, min_size=1, max_size=2))
    def prefill(self, batch: list[list[int]]) -> None:
        held = [self.new(tokens) for tokens in batch]
        outputs = self.executor.batch_prefill([(one.key, one.tokens, WITH_LOGITS) for one in held])
        for one, output in zip(held, outputs, strict=True):
            self.check(output, one.tokens)

    @precondition(lambda self: bool(self.held))
    @rule(number=picks, tokens=prompts)
    def extend(self, number: int, tokens: list[int]) -> None:
        one = self.pick(number)
        if len(one.tokens) + len(tokens) <= MAX_TOKENS:
            one.tokens += tokens
            self.check(self.executor.prefill(one.key, tokens, WITH_LOGITS), one.tokens)

    @precondition(lambda self: bool(self.held))
    @rule(number=picks, token=tokens_of)
    def decode(self, number: int, token: int) -> None:
        one = self.pick(number)
        one.tokens.append(token)
        self.check(self.executor.decode(one.key, token, WITH_LOGITS), one.tokens)

    @precondition(lambda self: bool(self.held))
    @rule(tokens=st.lists(tokens_of, min_size=MOST_HELD, max_size=MOST_HELD), steps=st.integers(1, 3))
    def batch_decode(self, tokens: list[int], steps: int) -> None:
        """The first step with tokens of the caller's, the others with those that were chosen."""
        for _ in range(steps):
            pairs = list(zip(self.held, tokens, strict=False))
            outputs = self.executor.batch_decode([(one.key, token, WITH_LOGITS) for one, token in pairs])
            for (one, token), output in zip(pairs, outputs, strict=True):
                one.tokens.append(token)
                self.check(output, one.tokens)
            tokens = [output.token_id for output in outputs]

    @precondition(lambda self: 0 < len(self.held) < MOST_HELD)
    @rule(number=picks, token=tokens_of, prompt=prompts)
    def unified(self, number: int, token: int, prompt: list[int]) -> None:
        one = self.pick(number)
        one.tokens.append(token)
        started = self.new(prompt)
        items = [(one.key, [token], 1, WITH_LOGITS), (started.key, prompt, 1, WITH_LOGITS)]
        rows = self.executor.unified_decode(items)
        self.check(rows[0][-1], one.tokens)
        self.check(rows[1][-1], prompt)

    @precondition(lambda self: bool(self.held))
    @rule(number=picks, tokens=st.lists(tokens_of, min_size=1, max_size=6), right=st.integers(0, 5))
    def verify(self, number: int, tokens: list[int], right: int) -> None:
        """The first `right` drafts are what the model would choose."""
        one = self.pick(number)
        for index in range(1, min(right + 1, len(tokens))):
            tokens[index] = int(self.oracle.logits(one.tokens + tokens[:index])[-1].argmax())
        outputs, accepted = self.executor.forward_verify(one.key, tokens, WITH_LOGITS, Accept.CHOSEN)
        for index, output in enumerate(outputs):
            self.check(output, one.tokens + tokens[: index + 1])
        chosen = [output.token_id for output in outputs]
        agreed = [draft == choice for draft, choice in zip(tokens[1:], chosen, strict=False)]
        assert accepted == [*agreed, False].index(False)
        one.tokens += tokens[: accepted + 1]

    @precondition(lambda self: 0 < len(self.held) < MOST_HELD)
    @rule(number=picks)
    def fork(self, number: int) -> None:
        parent = self.pick(number)
        child = self.new(parent.tokens)
        self.executor.fork(parent.key, [child.key])

    @precondition(lambda self: bool(self.held))
    @rule(number=picks, cut=st.integers(0, 70))
    def truncate(self, number: int, cut: int) -> None:
        one = self.pick(number)
        del one.tokens[max(1, len(one.tokens) - cut) :]
        self.executor.truncate_kv(one.key, len(one.tokens))

    @precondition(lambda self: bool(self.held))
    @rule(number=picks)
    def release(self, number: int) -> None:
        one = self.pick(number)
        self.held.remove(one)
        assert self.executor.release_cache(one.key)
        assert not self.executor.release_cache(one.key)

    @invariant()
    def the_pool_is_intact(self) -> None:
        self.executor.check_integrity()

    def teardown(self) -> None:
        for one in self.held:
            self.executor.release_cache(one.key)
        self.executor.check_integrity()
        assert self.executor.cache_metrics_snapshot().pages_referenced == 0


def run(directory: Path, device: torch.device) -> None:
    """Run the machine with the model of a directory, made of MODEL."""
    OperationsMachine.executor = LlmExecutor.load(
        directory,
        dtype="float32",
        device=device,
        kv_pages=PAGES,
        limits=StepLimits(max_tokens=256, max_items=MOST_HELD),
    )
    OperationsMachine.oracle = Oracle(directory, device)
    try:
        run_state_machine_as_test(
            OperationsMachine,
            settings=settings(
                max_examples=sized(40, 8),
                stateful_step_count=sized(30, 20),
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        del OperationsMachine.executor, OperationsMachine.oracle
