"""A cache of a quantised model goes on exactly on a worker with another instruction set, which replays it."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.v1 import types_pb2

from kernels.cpu import library
from tests.gateway_process import GatewayProcess
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import TinyModel, make_model

PROMPT = [(5 * i + 2) % 97 for i in range(600)]
STEPS, TURNS = 12, 3
WANTED = types_pb2.OutputOptions(logits=types_pb2.DATA_TYPE_F32, logprob=True)
Answers = list[tuple[int, bytes, float]]


def answer_of(output: types_pb2.StepOutput) -> tuple[int, bytes, float]:
    return output.token_id, output.logits.data, output.logprob


def answers(model: Path, data: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> Answers:
    """A text that is continued on a gateway after the other, whose workers have these instruction sets."""
    flags = ["--quantization", "q8_0", "--device", "cpu", "--kv-pages", "64", "--data-dir", str(data)]
    found: Answers = []
    handle = types_pb2.KvCacheHandle()
    for name in names:
        monkeypatch.setenv(library.VARIABLE, name)
        with GatewayProcess(model=str(model), flags=flags, forks=False) as gateway:
            if not found:
                prefilled = gateway.prefill(PROMPT, output=WANTED)
                handle, found = prefilled.kv_cache, [answer_of(prefilled.output)]
            assert f"cpu-{name}" in gateway.capabilities().executor.products
            for _ in range(STEPS):
                step = gateway.decode(handle.cache_id, found[-1][0], position=handle.seq_len, output=WANTED)
                handle = step.kv_cache
                found.append(answer_of(step.output))
    return found


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_cache_goes_on_exactly_with_another_instruction_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_compiled()
    flags = library.cpu_flags()
    names = [known.name for known in library.X86_SETS if known.cpu_flags <= flags and known.name != "amx"]
    if len(names) < 2:
        pytest.skip(f"this CPU has only {', '.join(names) or 'none of the sets'}")
    for name in names:
        monkeypatch.setenv(library.VARIABLE, name)
        library.instruction_set.cache_clear()
        library.build()
    library.instruction_set.cache_clear()
    model = make_model(tmp_path / "model", TinyModel(dtype="bfloat16", max_positions=1024))
    alone = answers(model, tmp_path / "alone", names[:1] * TURNS, monkeypatch)
    turns = [names[turn % len(names)] for turn in range(TURNS)]
    assert answers(model, tmp_path / "moved", turns, monkeypatch) == alone
