"""The warm-up asks for everything that a request can ask for, so that no caller waits for a first time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.in_process import LlmExecutor
from tests.families import settings_of
from tests.model_factory import TinyModel, make_family_model, make_model
from workers import batch
from workers.decodes import NO_DECODES, Decodes
from workers.operations import Chunk, Forward
from workers.outputs import FILTERS, OutputSpec, Sampling, VerifyRow
from workers.runners.eager import EagerRunner
from workers.sampling import SamplingRow

# What changes nothing of what is computed, and what has to do with one more than with others.
SAME_WORK = {
    OutputSpec: {"row_weight", "is_plain", "is_token_only", "end_token_ids"},
    # What filters a draw is launched together, as are all penalties.
    Sampling: {"seed", "penalty_from", "frequency_penalty", "presence_penalty", *FILTERS} - {"top_p"},
    VerifyRow: {"mask"},  # that of the output is applied by the same kernel
}


def given(value: Any) -> set[str]:
    """The fields of a dataclass that are not as by default."""
    default = type(value)()
    names = [field.name for field in dataclasses.fields(value)]
    return {name for name in names if getattr(value, name) != getattr(default, name)}


class Seen:
    """What was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fields: dict[type, set[str]] = {OutputSpec: set(), Sampling: set(), VerifyRow: set()}
        self.forwards: list[Forward] = []
        # Whether drafts are kept by distributions with and without top_k, top_p or min_p.
        self.drafts: set[bool] = set()
        self.sampled: set[bool] = set()
        pack, step = batch.pack, EagerRunner.step

        def packed(chunks: Sequence[Chunk], page_size: int, decodes: Decodes = NO_DECODES, *more: Any) -> Any:
            for chunk in chunks:
                self._see(chunk.forward)
            return pack(chunks, page_size, decodes, *more)

        def stepped(runner: EagerRunner, inputs: Any, rows: Sequence[SamplingRow], *more: Any) -> Any:
            self.drafts |= {
                row.spec.top_p < 1 for row in rows if row.draft is not None and row.spec is not None
            }
            return step(runner, inputs, rows, *more)

        monkeypatch.setattr("workers.executors.engine.pack", packed)
        monkeypatch.setattr(EagerRunner, "step", stepped)

    def _see(self, forward: Forward) -> None:
        self.forwards.append(forward)
        output = forward.output
        self.fields[OutputSpec] |= given(output)
        if output.sampling is not None:
            self.fields[Sampling] |= given(output.sampling)
        if output.sampled_logprob:
            self.sampled.add(output.sampling is not None and output.sampling.top_p < 1)
        for choice in forward.choices:
            self.fields[VerifyRow] |= given(choice)


@pytest.mark.parametrize("has_experts", [False, True])
def test_all_that_a_request_can_have_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_experts: bool
) -> None:
    """On a GPU, log-probabilities, a bias and drafts were compiled while a caller and all others waited."""
    if has_experts:
        make_family_model(tmp_path, *settings_of("qwen3_moe"))
    else:
        make_model(tmp_path, TinyModel())
    executor = LlmExecutor.load(tmp_path, kv_pages=8, self_check=False)
    seen = Seen(monkeypatch)
    executor.warmup()
    for kind, fields in seen.fields.items():
        every = {field.name for field in dataclasses.fields(kind)} - SAME_WORK[kind]
        assert fields >= every - ({"experts"} if not has_experts else set()), kind
    assert seen.drafts == seen.sampled == {False, True}, "with top_p and without"
    assert any(forward.scored for forward in seen.forwards)
    assert any(forward.sample_seeds for forward in seen.forwards)
    assert any(forward.parents for forward in seen.forwards)


@pytest.mark.parametrize("length", [2, 3, 16, 17, 19])
def test_whatever_the_context_no_page_stays(tmp_path: Path, length: int) -> None:
    executor = LlmExecutor.load(make_model(tmp_path, TinyModel(max_positions=length)), kv_pages=2)
    empty = executor.engine.kv_table.usage()
    executor.warmup()
    assert executor.engine.kv_table.usage() == empty
    executor.check_integrity()
