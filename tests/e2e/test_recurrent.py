"""Models with recurrent layers through a gateway, against transformers, also after a killed worker.

Any operations of them, also of models that the library runs: tests/workers/test_recurrent_engine.py. Over
ranks: tests/workers/test_rank_processes.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.e2e.parity_machine import WITH_LOGITS
from tests.gateway_process import GatewayProcess
from tests.model_factory import hf_logits
from tests.recurrent import RECURRENT
from tests.tiny_types import tiny_model

FLAGS = ["--dtype", "float32", "--kv-pages", "64", "--max-batch-tokens", "48"]
PATIENCE_S = 60


@pytest.mark.parametrize(
    ("model_type", "ranks"),
    [("granitemoehybrid", 1), pytest.param("kimi_linear", 2, marks=pytest.mark.thorough)],
)
def test_a_cache_after_cuts_and_a_kill_is_as_if_nothing_had_been_lost(
    model_type: str, ranks: int, tmp_path: Path
) -> None:
    """Its state is that of its last append, of a snapshot, and computed again from all tokens."""
    model = tmp_path / "model"
    tiny_model(model_type, **RECURRENT[model_type]).save_pretrained(model)
    flags = [*FLAGS, "--tensor-parallel", str(ranks)]
    with GatewayProcess(model=str(model), workers=1, flags=flags) as gateway:
        capabilities = gateway.capabilities().executor
        assert gateway.model().backend == "native"
        assert capabilities.bytes_per_state and not capabilities.supports_token_trees
        text = [(3 * i + 1) % 97 for i in range(240)]
        cache = gateway.prefill(text).kv_cache.cache_id
        for length in (230, 100):
            del text[length:]
            gateway.truncate(cache, length)
            append_and_check(gateway, model, cache, text)
        (worker,) = gateway.worker_processes()
        assert len(worker.children()) == ranks - 1
        # Of several ranks another one than the first.
        [worker, *worker.children()][-1].kill()
        append_and_check(gateway, model, cache, text)


def append_and_check(gateway: GatewayProcess, model: Path, cache: str, text: list[int]) -> None:
    answer = gateway.decode(cache, 5, position=len(text), output=WITH_LOGITS)
    text.append(5)
    exact = hf_logits(model, text)[-1].numpy()
    found = np.frombuffer(answer.output.logits.data, "<f4")
    assert np.abs(found - exact).max() / np.abs(exact).max() < 1e-4
