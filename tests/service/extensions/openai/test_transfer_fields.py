"""What is refused of a trainer's tensors before any of them is received."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from service.config import Config
from service.errors import InvalidArgument, StorageUnavailable
from service.extensions.openai import weight_transfer
from service.extensions.openai.fields import Fields
from service.extensions.openai.transfer_fields import tensors_of
from service.extensions.openai.weight_transfer import WeightTransfer
from service.pool.model_versions import ModelVersions
from service.runtimes.weight_uploads import WeightUploads
from service.uploads import RESERVE_BYTES

GIVEN: dict[str, Any] = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], []]}
BEFORE = [("c", "float16", [5])]


def test_their_bytes_are_counted() -> None:
    tensors, left_bytes = tensors_of(Fields(GIVEN), BEFORE, (), 30)
    assert (tensors, left_bytes) == ([("a", "float32", [2, 3]), ("b", "bfloat16", [])], 4)
    assert tensors_of(Fields({}), BEFORE, (), 30) == (BEFORE, 20)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"names": ["a", "a"]}, "names[1]"),
        ({"names": ["a", "known"]}, "names[1]"),
        ({"names": ["", "b"]}, "names[0]"),
        ({"names": [1, "b"]}, "names[0]"),
        ({"names": ["a"]}, "shapes"),
        ({"dtype_names": ["float32", "int8"]}, "dtype_names[1]"),
        ({"dtype_names": ["float32", ["float32"]]}, "dtype_names[1]"),
        ({"shapes": [[2, 0], []]}, "shapes[0]"),
        ({"shapes": [[2, True], []]}, "shapes[0]"),
        ({"shapes": [[1] * 9, []]}, "shapes[0]"),
        ({"shapes": [[1 << 62, 1 << 62], []]}, "shapes[0]"),
        ({"shapes": [[7], []]}, "shapes"),
        ({"ipc_handles_pickled": "gASVAA=="}, "ipc_handles_pickled"),
    ],
)
def test_others_are_refused_by_name(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        tensors_of(Fields({**GIVEN, **changed}), BEFORE, {"known"}, 29)
    assert refused.value.field == field


class Receiver:
    """In place of the process that receives."""

    is_running = True

    def __init__(self) -> None:
        self.told_of: list[str] = []

    async def start(self) -> Receiver:
        return self

    async def told(self, command: dict[str, Any], *_: object) -> None:
        self.told_of += command

    async def end(self) -> None:
        pass


async def test_room_is_left_for_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that is full no call of any caller can be answered."""
    served = tmp_path / "served"
    served.mkdir()
    (served / "config.json").touch()
    receiver = Receiver()
    monkeypatch.setattr(weight_transfer, "ReceivingProcess", receiver)
    uploads = WeightUploads(tmp_path / "data", ModelVersions(str(served), 1), Config())
    admin = SimpleNamespace(uploads=uploads, state=SimpleNamespace(has_other_gateways=False))
    transfer = WeightTransfer(cast("Any", admin), "gloo", 60.0)
    group = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2}
    await transfer._init(Fields({"init_info": group}))
    await transfer._start(Fields({}))
    # 6 numbers of 4 bytes and one of 2.
    almost_full = SimpleNamespace(free=RESERVE_BYTES + 25)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: almost_full)
    with pytest.raises(StorageUnavailable, match="No space left"):
        await transfer._update(Fields({"update_info": GIVEN}))
    assert receiver.told_of == ["join"] and not list((tmp_path / "data" / "weight-uploads").iterdir())
