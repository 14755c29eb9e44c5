"""`python -m workers.weight_receiver`: writes tensors that a trainer broadcasts as safetensors files.

A process of its own: a collective cannot be stopped but with the process that waits in it, and what a trainer
does wrong concerns no worker. Lines of JSON on standard input say what to do, and are answered by others:

    {"join": {...}}                            -> {"joined": true}
    {"receive": {"path": "...", "tensors": [[name, dtype, shape], ...]}}
        -> {"received": N} after each broadcast, with the bytes so far, then {"written": true}

Instead of an answer it writes {"error": "..."}, and ends. It does not say when that took too long: who gives
the commands ends the process.
"""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import math
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import distributed

Report: TypeAlias = Callable[[dict[str, object]], None]
# In headers of safetensors files.
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Where vLLM's trainers leave what the ranks of an NCCL group have to know.
_UNIQUE_ID_KEY = "broadcast_from/0/0"
_UNIQUE_ID_BYTES = 128


class Broadcasts(Protocol):
    """A group whose rank 0 is the trainer."""

    device: torch.device

    def receive(self, tensor: torch.Tensor) -> None:
        """Waits for the next tensor that the trainer broadcasts, of this shape and dtype."""


class Gloo:
    """A group of torch.distributed."""

    device = torch.device("cpu")

    def __init__(self, info: Mapping[str, Any]) -> None:
        distributed.init_process_group(
            "gloo",
            init_method=_address(info["host"], info["port"]),
            rank=info["rank"],
            world_size=info["world_size"],
            timeout=dt.timedelta(seconds=info["timeout_s"]),
        )

    def receive(self, tensor: torch.Tensor) -> None:
        distributed.broadcast(tensor, 0)


class Nccl:
    """A communicator as vLLM's trainers make one, by a unique id that they share over a TCPStore or send."""

    def __init__(self, info: Mapping[str, Any], nccl: Any = torch.cuda.nccl, device: str = "cuda") -> None:
        """`nccl`: torch's module of this name."""
        self._nccl = nccl
        self.device = torch.device(device)
        encoded = info["unique_id"]
        unique_id = base64.b64decode(encoded) if encoded else _stored_unique_id(info)
        self._communicator = nccl.init_rank(info["world_size"], unique_id, info["rank"])
        # vLLM's begin with it.
        nccl.all_reduce([torch.zeros(1, device=self.device)], comms=[self._communicator])

    def receive(self, tensor: torch.Tensor) -> None:
        self._nccl.broadcast([tensor], 0, comms=[self._communicator])


def _address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _stored_unique_id(info: Mapping[str, Any]) -> bytes:
    timeout = dt.timedelta(seconds=info["timeout_s"])
    store = distributed.TCPStore(  # type: ignore[attr-defined]  # in torch's documentation it is there
        info["host"], info["port"], info["world_size"], is_master=False, timeout=timeout
    )
    return unique_id_of(store.get(_UNIQUE_ID_KEY))


def unique_id_of(pickled: bytes) -> bytes:
    """The bytes of a pickled `ncclUniqueId`, a ctypes structure. Runs nothing that a pickle may name.

    Raises ValueError for anything else.
    """
    try:
        found = _UniqueIds(io.BytesIO(pickled)).load()
    except Exception:
        found = None
    if not isinstance(found, bytes) or len(found) != _UNIQUE_ID_BYTES:
        raise ValueError("the trainer shares something else than a unique id of NCCL")
    return found


class _UniqueIds(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            # Is called with the class, and its attributes and bytes.
            return lambda _, state: state[1]
        if name == "ncclUniqueId":
            return None
        raise pickle.UnpicklingError(name)


class Announced(NamedTuple):
    """A tensor that will be broadcast. `dtype`: as configs name it."""

    name: str
    dtype: str
    shape: Sequence[int]

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


def write(
    path: Path, tensors: Sequence[Announced], broadcasts: Broadcasts, packed_bytes: int, report: Report
) -> None:
    """Receives tensors and writes them into a new file. Raises OSError, and what `broadcasts` raises.

    `packed_bytes`: several come in one broadcast, the last of which exceeds this sum. 0: each by itself.
    """
    received = 0
    with path.open("xb") as file:
        file.write(_header(tensors))
        for pack in _packs(tensors, packed_bytes):
            # In one broadcast they are as they are in a file: one behind the other.
            shape, dtype = (
                ([sum(each.nbytes for each in pack)], torch.uint8)
                if packed_bytes
                else (pack[0].shape, pack[0].torch_dtype)
            )
            buffer = torch.empty(shape, dtype=dtype, device=broadcasts.device)
            # All ones are NaN in each dtype: gloo takes a broadcast of fewer bytes for a whole one.
            buffer.reshape(-1).view(torch.uint8).fill_(0xFF)
            broadcasts.receive(buffer)
            file.write(buffer.cpu().reshape(-1).view(torch.uint8).numpy().data)
            received += buffer.nbytes
            report({"received": received})


def _packs(tensors: Iterable[Announced], packed_bytes: int) -> Iterator[list[Announced]]:
    pack: list[Announced] = []
    size_bytes = 0
    for tensor in tensors:
        pack.append(tensor)
        size_bytes += tensor.nbytes
        if not packed_bytes or size_bytes > packed_bytes:
            yield pack
            pack, size_bytes = [], 0
    if pack:
        yield pack


def _header(tensors: Iterable[Announced]) -> bytes:
    entries, end = {}, 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def serve(commands: Iterable[str], report: Report) -> None:
    """Carries out commands until there are no more, or one fails."""
    broadcasts: Broadcasts | None = None
    packed_bytes = 0
    for line in commands:
        command = json.loads(line)
        try:
            if (join := command.get("join")) is not None:
                broadcasts = (Gloo if join["backend"] == "gloo" else Nccl)(join)
                packed_bytes = join["packed_bytes"]
                report({"joined": True})
            else:
                assert broadcasts is not None
                receive = command["receive"]
                tensors = [Announced(*each) for each in receive["tensors"]]
                write(Path(receive["path"]), tensors, broadcasts, packed_bytes, report)
                report({"written": True})
        except Exception as error:
            print(f"weights were not received: {error!r}", file=sys.stderr)
            storage = isinstance(error, OSError) and error.strerror
            report(
                {"error": f"cannot be written: {storage}" if storage else "the trainer has gone, or differs"}
            )
            return


def _lines() -> Iterator[str]:
    """Lines of standard input. At its end the process ends, also while a command is carried out."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


def main() -> None:
    """Carries out commands."""
    # NCCL writes its log to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    serve(_lines(), lambda answer: print(json.dumps(answer), file=answers))


if __name__ == "__main__":
    main()
