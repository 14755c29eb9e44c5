"""Which GPUs workers get. The list of devices is a fake `nvidia-smi`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.config import Config
from service.pool import gpus
from service.pool.local import LocalLauncher, settings_of
from workers.common import worker_pb2

UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    listed = "\n".join(f"{n}, {uuid}" for n, uuid in enumerate(UUIDS))
    program.write_text(f"#!/bin/sh\ncat <<END\n{listed}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, UUIDS),
        ("2,0", [UUIDS[2], UUIDS[0]]),
        ("GPU-cccc-3,GPU-aabb", [UUIDS[2], UUIDS[1]]),
        ("1", [UUIDS[1]]),
        ("GPU-c", [UUIDS[2]]),
        ("MIG-1,MIG-2", ["MIG-1", "MIG-2"]),
        ("", []),
        ("-1", []),
        ("0,7", []),
        ("0, 1", []),
        ("0,0", []),
        ("0,GPU-aaaa", []),
        ("MIG-1,MIG-1", []),
        ("GPU-aa", []),
    ],
)
def test_chosen(machine: Path, visible: str | None, expected: list[str]) -> None:
    """By number or UUID, in the order given. What is not known here is left to CUDA."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus.chosen(Config(), environ) == expected


def test_one_worker_for_each_gpu(machine: Path) -> None:
    def workers(**settings: object) -> int | None:
        config = Config().with_values({"workers": None} | settings)
        return gpus.with_workers(config, gpus.chosen(config, {})).workers

    assert workers() == 3
    assert workers(tensor_parallel=2) == 1
    assert workers(workers=2) == 2
    assert workers(device="cpu") == 1


async def test_each_worker_has_gpus_of_its_own() -> None:
    """What the gateway adopts has to have the same GPUs."""
    launcher = LocalLauncher(None, 0.0, gpus=UUIDS)
    configs = [worker_pb2.WorkerConfig(device="auto", device_index=n, tensor_parallel=2) for n in (0, 1)]
    own, others = (launcher.assign(config) for config in configs)
    assert list(own) == UUIDS[:2] and list(others) == []
    assert [config.device_index for config in configs] == [0, 1], "it says that there are too few"
    assert settings_of(configs[0], own) != settings_of(configs[0], own[::-1])
