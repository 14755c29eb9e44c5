"""A decode runner whose graphs cannot be captured: decodes run eagerly, and it says so once.

What a failed capture leaves of the real device is tested in tests/gpu; here it is one that only notes calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu.sizes import repeat_launches
from tests.kernels.cuda import test_decode_runner
from tests.kernels.cuda.test_decode_runner import Twins
from tests.model_factory import TinyModel, make_model
from tests.workers.packing import HandSequence, Item
from workers.executors.llm import LlmExecutor
from workers.models.decoder import Decoder
from workers.outputs import Sampling
from workers.runners.base import DeviceLostError
from workers.runners.cuda_graph import CudaGraphRunner, buckets_up_to
from workers.runners.graph_capture import CaptureError, CudaCapture
from workers.sampling import SamplingRow

decoder = test_decode_runner.decoder

MAX_ROWS = 4
BUCKETS = len(buckets_up_to(MAX_ROWS))
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nof many")


class FailingCapture:
    """Repeats launches, until a number of captures have succeeded; then fails, after launching."""

    def __init__(self, error: Exception, succeed: int) -> None:
        self.error, self.succeed = error, succeed
        self.calls = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.calls += 1
        replay = repeat_launches(run)
        if self.calls > self.succeed:
            raise self.error
        return replay


@pytest.mark.parametrize("succeed", [0, 1, BUCKETS - 1])
@pytest.mark.parametrize("error", [RuntimeError("planted\nat length"), OUT_OF_MEMORY], ids=["any", "memory"])
def test_decodes_run_eagerly_after_a_failed_capture(
    decoder: Decoder, device: str, error: Exception, succeed: int, caplog: pytest.LogCaptureFixture
) -> None:
    capture = FailingCapture(error, succeed)
    twins = Twins(decoder, device, MAX_ROWS, capture)
    assert twins.graph.name == "cuda_graph"
    sequences = [HandSequence() for _ in range(3)]
    for sequence in sequences:
        twins.step([Item(sequence, [5, 6])])
    tokens = [1, 2, 3]
    for _ in range(4):
        rows = [SamplingRow(Sampling(temperature=1.0, seed=seed), position=5) for seed in range(3)]
        tokens = twins.step([Item(s, [token]) for s, token in zip(sequences, tokens, strict=True)], rows)
    assert capture.calls == succeed + 1, "a capture that failed was tried again"
    assert twins.graph.name == "eager"
    (record,) = caplog.records
    reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert record.levelname == "WARNING" and record.getMessage().endswith(f": {reason}")


def test_a_device_that_is_lost_while_capturing_stays_lost(decoder: Decoder, device: str) -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    twins = Twins(decoder, device, MAX_ROWS, FailingCapture(error, 1))
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        twins.graph.step(twins.packer.pack([Item(HandSequence(), [1])]), [SamplingRow()])


def test_nothing_of_the_graphs_is_kept(decoder: Decoder, device: str) -> None:
    twins = Twins(decoder, device, MAX_ROWS, FailingCapture(OUT_OF_MEMORY, 2))
    twins.step([Item(HandSequence(), [1])])
    assert twins.graph._captured is None


def test_the_executor_tells_what_runs(tmp_path: Path) -> None:
    executor = LlmExecutor.load(make_model(tmp_path, TinyModel(head_dim=64)), kv_pages=16)
    engine = executor.engine
    model = engine.runner._model  # type: ignore[attr-defined]
    capture = FailingCapture(RuntimeError("planted"), 0)
    engine.runner = CudaGraphRunner(model, engine.kv, max_rows=2, max_seq_len=64, capture=capture)
    assert executor.capabilities().runner == "cuda_graph"
    executor.warmup()
    assert executor.capabilities().runner == "eager"


class NotingDevice:
    """In place of `torch.cuda`: notes what is called. `fails` raises, by name, each time it is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fails: Exception) -> None:
        self.calls: list[str] = []
        self.fails = fails
        graph = SimpleNamespace(
            capture_begin=self.noting("capture_begin"), capture_end=self.noting("capture_end"), replay=None
        )
        stream = SimpleNamespace(wait_stream=lambda _: None, device_index=0)
        for name, value in {
            "Stream": lambda _: stream,
            "CUDAGraph": lambda: graph,
            "graph_pool_handle": lambda: (0, 1),
            "current_stream": lambda _: stream,
            "stream": self.on_stream,
            "synchronize": self.noting("synchronize"),
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, self.noting(name), raising=False)

    def noting(self, name: str) -> Callable[..., None]:
        def call(*_: object, **__: object) -> None:
            self.calls.append(name)
            if name in self.fails:
                raise self.fails[name]

        return call

    @contextlib.contextmanager
    def on_stream(self, _: object):  # type: ignore[no-untyped-def]
        self.calls.append("enter")
        try:
            yield
        finally:
            self.calls.append("leave")


def fail_when_recorded(device: NotingDevice) -> Callable[[], None]:
    def run() -> None:
        if "capture_begin" in device.calls:
            raise RuntimeError("planted")

    return run


def test_a_capture_that_fails_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    noting = NotingDevice(monkeypatch)
    with pytest.raises(CaptureError) as failure:
        CudaCapture(torch.device("cuda:0"))(fail_when_recorded(noting))
    assert str(failure.value.__cause__) == "planted"
    warm_up = ["enter", "leave", "synchronize"]
    assert noting.calls == [*warm_up, "enter", "capture_begin", "capture_end", "leave", "synchronize"]


def test_a_capture_that_cannot_be_ended_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    invalid = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    noting = NotingDevice(monkeypatch, capture_end=invalid)
    with pytest.raises(CaptureError) as failure:
        CudaCapture(torch.device("cuda:0"))(fail_when_recorded(noting))
    assert str(failure.value.__cause__) == "planted"
    ended = ["capture_end", "_cuda_endAllocateToPool", "_cuda_releasePool", "leave", "synchronize"]
    assert noting.calls[-5:] == ended


def test_a_pool_that_the_graph_releases_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("not currently recording")
    noting = NotingDevice(monkeypatch, capture_end=error, _cuda_endAllocateToPool=error)
    with pytest.raises(CaptureError):
        CudaCapture(torch.device("cuda:0"))(lambda: None)
    assert "_cuda_releasePool" not in noting.calls and noting.calls[-2:] == ["leave", "synchronize"]


def test_a_lost_device_is_no_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    NotingDevice(monkeypatch, synchronize=lost)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        CudaCapture(torch.device("cuda:0"))(lambda: None)
