"""Callers are given the bits of a text that runs alone: whatever they do, who else is served, and who dies.

The machine of `parity_machine`, where each number is compared, to the bit, with one forward in this process
over the whole text by itself. Meanwhile others are served, the pools are so small that KV is preempted and
replayed, and workers are killed.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from numpy.typing import NDArray
from quire.v1 import types_pb2

from tests.e2e.parity_machine import (
    LAYER,
    VOCAB,
    WITH_LOGITS,
    ParityMachine,
    Truth,
    picks,
    prompts,
    run_parity_machine,
    tokens_of,
)
from tests.e2e.test_execute import execute, item, tokens
from tests.families import settings_of
from tests.gateway_process import GatewayProcess
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import load_decoder, make_family_model
from tests.token_trees import random_tree
from tests.workers.packing import HandPacker, HandSequence, Item
from workers.models.capture import RowCapture
from workers.models.model import new_pages
from workers.row_outputs import log_probabilities

# Of which two long texts leave room for hardly more than company.
KV_PAGES = 36


class Alone:
    """A model that runs a text by itself, in one forward."""

    def __init__(self, directory: Path, dtype: str, kv_dtype: str) -> None:
        self._decoder = load_decoder(directory, dtype, pack=True)
        self._kv = new_pages(self._decoder, KV_PAGES, kv_dtype)

    def truth(self, text: Sequence[int]) -> Truth:
        """Logits after each token, and the states of LAYER."""
        rows = range(len(text))
        inputs = HandPacker(self._kv.page_size, range(KV_PAGES)).pack([Item(HandSequence(), text, rows)])
        logits = self._decoder.logits(self._decoder.forward(inputs, self._kv))
        capture = RowCapture({LAYER: rows})
        self._decoder.forward(inputs, self._kv, capture)
        return logits.float().numpy(), capture.found[LAYER].float().numpy()


class Company:
    """Another caller, who keeps the workers busy with texts of its own and remembers what it was given."""

    def __init__(self, gateway: GatewayProcess, seed: int) -> None:
        # Texts, and what followed their last tokens.
        self.given: list[tuple[list[int], list[types_pb2.StepOutput]]] = []
        self.failed: BaseException | None = None
        self._gateway, self._dice = gateway, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def leave(self) -> None:
        """Waits until its last call is answered."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._say(self._draw(self._dice.randint(1, 60)))
            # Not all the time: each number that it is given is computed again.
            while not self._stop.wait(0.02):
                self._say(self._draw(self._dice.randint(1, 60)))
        except BaseException as failure:
            self.failed = failure

    def _draw(self, count: int) -> list[int]:
        return [self._dice.randrange(VOCAB) for _ in range(count)]

    def _say(self, text: list[int]) -> None:
        output = self._dice.choice((WITH_LOGITS, SameBitsMachine.output))
        answer = self._gateway.prefill(text, output=output)
        outputs = [answer.output]
        self.given.append((text, outputs))
        cache_id = answer.kv_cache.cache_id
        for token in self._draw(self._dice.randint(0, 12)):
            text.append(token)
            outputs.append(self._gateway.decode(cache_id, token, output=output).output)
        # Branches are summed in another order, and are nobody's business but their own.
        tree = random_tree(self._dice, 0, self._dice.randint(2, 12), VOCAB)
        asked = {"parents": tree.parents, "accept": types_pb2.VERIFY_ACCEPT_GREEDY}
        self._gateway.verify(cache_id, tree.token_ids, **asked)
        self._gateway.release(cache_id)


class SameBitsMachine(ParityMachine):
    """Callers' operations in any order, beside others."""

    alone: Alone
    # Who else runs in a step is another in each run, so that a failure cannot be made smaller.
    phases = (Phase.generate,)
    # Hidden states take another way through the model. Company asks for some: steps are of both kinds.
    output = types_pb2.OutputOptions(logits=types_pb2.DATA_TYPE_F32)

    @initialize(seed=picks)
    def begin(self, seed: int) -> None:
        self.company = [Company(self.harness.gateway, seed + one) for one in range(2)]
        self.killed = False

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        text = list(tokens)
        for _ in range(count):
            text.append(int(self.alone.truth(text)[0][-1].argmax()))
        return text[len(tokens) :]

    def truths(self, texts: Sequence[list[int]]) -> list[Truth]:
        return [self.alone.truth(text) for text in texts]

    def check_output(
        self, output: types_pb2.StepOutput, logits: NDArray[np.float32], state: NDArray[np.float32]
    ) -> None:
        assert output.logits.data == logits.tobytes()
        assert not output.hidden or output.hidden[0].data == state.tobytes()
        assert output.token_id == int(logits.argmax())

    def check_scores(self, answer: Any, tokens: list[int], first: int, truth: Truth | None = None) -> None:
        logits = (truth or self.alone.truth(tokens))[0][first - 1 : -1]
        assert list(answer.token_logprobs) == [
            logprobs_of(row)[token] for row, token in zip(logits, tokens[first:], strict=True)
        ]

    @precondition(lambda self: bool(self.held))
    @rule(number=picks, drafts=st.lists(tokens_of, min_size=2, max_size=6))
    def verify_tree(self, number: int, drafts: list[int]) -> None:
        """A tree of one path. One with branches is not promised the bits of its paths."""
        held = self.pick(number)
        asked = {"parents": range(len(drafts) - 1), "accept": types_pb2.VERIFY_ACCEPT_GREEDY}
        answer = self.gateway.verify(held.cache_id, drafts, output=self.output, **asked)
        self.check_rows(answer.outputs, held.tokens + drafts)
        held.tokens += drafts[: answer.accepted + 1]
        held.last = None
        self.check_step(held, answer.kv_cache)

    @rule(prompt=prompts, count=st.integers(1, 12))
    def execute(self, prompt: list[int], count: int) -> None:
        ((_, chunks),) = execute(
            self.harness.gateway, item("it", prompt, count, logprobs=True, top_logprobs=3)
        ).items()
        said = self.greedy(prompt, count)
        assert tokens(chunks) == said
        (logits, _), first = self.alone.truth(prompt + said), len(prompt) - 1
        found = [logprob for chunk in chunks for logprob in chunk.logprobs]
        for row, one, token in zip(logits[first:], found, said, strict=False):
            expected = logprobs_of(row)
            assert one.logprob == expected[token]
            assert list(one.top.logprobs) == [expected[at] for at in one.top.token_ids]

    @precondition(lambda self: bool(self.held) and not self.killed)
    @rule(number=picks)
    def lose_a_worker(self, number: int) -> None:
        """Its caches are replayed when they are next needed."""
        processes = sorted(self.harness.gateway.worker_processes(), key=lambda process: process.pid)
        processes[number % len(processes)].send_signal(signal.SIGKILL)
        self.killed = True
        for index in range(len(self.held)):
            self.decode(index, number % VOCAB)

    def teardown(self) -> None:
        for other in self.company:
            other.leave()
        self.harness.gateway.wait_until_ready()
        for other in self.company:
            assert other.failed is None, other.failed
        super().teardown()
        for other in self.company:
            assert other.given
            for text, outputs in other.given:
                self.check_rows(outputs, text)


def logprobs_of(logits: NDArray[np.float32]) -> list[float]:
    """[V] of one row."""
    row = torch.tensor(logits)[None]
    found: list[float] = log_probabilities(row, torch.arange(row.shape[1])[None])[0].tolist()
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype"),
    [
        ("mixtral", "bfloat16", "auto"),
        ("qwen3", "float32", "int8"),
        # Float32 and a model without experts: in test_parity_machine.py, to within rounding.
        pytest.param("qwen3", "float32", "auto", marks=pytest.mark.thorough),
        pytest.param("qwen3", "bfloat16", "auto", marks=pytest.mark.thorough),
        pytest.param("mixtral", "float32", "auto", marks=pytest.mark.thorough),
        pytest.param("gemma2", "float32", "bfloat16", marks=pytest.mark.thorough),
    ],
)
def test_any_operations_give_the_bits_of_a_text_alone(
    name: str, dtype: str, kv_dtype: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need_compiled()
    examples = 4 if request.config.getoption("--thorough") else 3
    model = make_family_model(tmp_path / "model", *settings_of(name), seed=3)
    SameBitsMachine.alone = Alone(model, dtype, kv_dtype)
    flags = ["--dtype", dtype, "--kv-cache-dtype", kv_dtype]
    flags += ["--kv-pages", str(KV_PAGES), "--max-batch-tokens", "48"]
    with GatewayProcess(model=str(model), workers=2, flags=flags) as gateway:
        run_parity_machine(gateway, model, examples=examples, steps=20, machine=SameBitsMachine)
