"""The executor's side of replaced weights: what it keeps, and what it puts into place."""

from __future__ import annotations

import queue
import weakref
from pathlib import Path

import pytest

from tests.model_factory import TinyModel, make_model
from workers.executors.llm import LlmExecutor
from workers.executors.memory import LoraLimits
from workers.operations import ReplacementRead, WeightsRead
from workers.runners.eager import EagerRunner

PATIENCE_S = 60


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_replaced_weights_leave_the_memory(tmp_path: Path, backend: str) -> None:
    """Also the first ones: a worker never holds more than two models, and one of them only while it reads."""
    models = [make_model(tmp_path / f"{seed}", TinyModel(seed=seed)) for seed in range(3)]
    lora = LoraLimits(max_adapters=2, max_rank=4, max_bytes=1 << 20)
    executor = LlmExecutor.load(models[0], kv_pages=8, lora=lora, backend=backend, self_check=False)
    replacement, runner = executor.replacement, executor.engine.runner
    assert replacement is not None and isinstance(runner, EagerRunner)
    reads: queue.Queue[ReplacementRead] = queue.Queue()
    replacement.submit = reads.put
    for op_id, source in enumerate(models[1:], start=1):
        old = weakref.ref(runner._model)
        replacement.read(op_id, str(source))
        answer = replacement.was_read(reads.get(timeout=PATIENCE_S))
        assert isinstance(answer, WeightsRead), answer
        replacement.apply()
        assert old() is None
        assert executor.info().fingerprint == answer.model.fingerprint
