"""What a trainer broadcasts as files; NCCL by a fake: it needs a device."""

from __future__ import annotations

import base64
import ctypes
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from workers.weight_receiver import Announced, Nccl, serve, unique_id_of, write

UNIQUE_ID = bytes(range(128))


class ncclUniqueId(ctypes.Structure):  # noqa: N801 - as vLLM names it
    _fields_ = (("internal", ctypes.c_byte * 128),)


class FakeNccl:
    """torch.cuda.nccl with a trainer behind it, which sends these tensors."""

    def __init__(self, *sent: torch.Tensor) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._sent = iter(sent)

    def init_rank(self, world_size: int, unique_id: bytes, rank: int) -> object:
        self.calls.append(("init_rank", world_size, unique_id, rank))
        return self

    def all_reduce(self, tensors: list[torch.Tensor], *, comms: list[object]) -> None:
        assert comms == [self]
        self.calls.append(("all_reduce", [each.numel() for each in tensors]))

    def broadcast(self, tensors: list[torch.Tensor], root: int, *, comms: list[object]) -> None:
        (tensor,), sent = tensors, next(self._sent)
        assert (root, comms) == (0, [self])
        assert (tensor.shape, tensor.dtype) == (sent.shape, sent.dtype)
        tensor.copy_(sent)


def info(unique_id: str | None, port: int = 0) -> dict[str, Any]:
    of_store = {"host": "127.0.0.1", "port": port, "timeout_s": 60}
    return {"world_size": 2, "rank": 1, "unique_id": unique_id, **of_store}


def made() -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.arange(12.0).reshape(3, 4),
        "norm": torch.arange(5).to(torch.bfloat16),
        "scalar": torch.tensor(7.0),
        "half": torch.arange(3).half(),
    }


def announced(weights: dict[str, torch.Tensor]) -> list[Announced]:
    return [
        Announced(name, str(each.dtype).removeprefix("torch."), each.shape) for name, each in weights.items()
    ]


@pytest.mark.parametrize(
    ("packed_bytes", "packs"), [(0, None), (13, (1, 2, 1)), (14, (1, 3)), (1 << 20, (4,))]
)
def test_files_have_what_was_broadcast(
    tmp_path: Path, packed_bytes: int, packs: tuple[int, ...] | None
) -> None:
    """As vLLM's trainers pack tensors: up to the one that exceeds the size."""
    weights, sent = made(), [*made().values()]
    if packs is not None:
        flat = iter([each.reshape(-1).view(torch.uint8) for each in sent])
        sent = [torch.cat([next(flat) for _ in range(count)]) for count in packs]
    nccl = FakeNccl(*sent)
    group = Nccl(info(base64.b64encode(UNIQUE_ID).decode()), nccl, "cpu")
    assert nccl.calls == [("init_rank", 2, UNIQUE_ID, 1), ("all_reduce", [1])]
    said: list[dict[str, object]] = []
    write(tmp_path / "file", announced(weights), group, packed_bytes, said.append)
    read = load_file(tmp_path / "file")
    assert list(read) and all(torch.equal(read[name], each) for name, each in weights.items())
    assert len(said) == len(sent)
    assert said[-1] == {"received": sum(each.nbytes for each in weights.values())}


def test_the_unique_id_is_found_where_trainers_of_vllm_leave_it() -> None:
    store: Any = distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    store.set("broadcast_from/0/0", pickle.dumps(ncclUniqueId((ctypes.c_byte * 128)(*UNIQUE_ID))))
    nccl = FakeNccl()
    Nccl(info(None, store.port), nccl, "cpu")
    assert nccl.calls[0] == ("init_rank", 2, UNIQUE_ID, 1)


class Attack:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


@pytest.mark.parametrize(
    "pickled", [pickle.dumps(Attack()), pickle.dumps(b"short"), pickle.dumps(print), b"no pickle"]
)
def test_nothing_else_is_unpickled(pickled: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="unique id"):
        unique_id_of(pickled)
    assert capsys.readouterr().out == ""


def test_a_failure_is_said_without_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.weight_receiver.Nccl", lambda join: Nccl(join, FakeNccl(), "cpu"))
    join = {**info(base64.b64encode(UNIQUE_ID).decode()), "backend": "nccl", "packed_bytes": 0}
    receive = {"path": str(tmp_path / "none" / "file"), "tensors": [["a", "float32", [1]]]}
    said: list[dict[str, object]] = []
    serve([json.dumps({"join": join}), json.dumps({"receive": receive}), "not read"], said.append)
    assert said == [{"joined": True}, {"error": "cannot be written: No such file or directory"}]
