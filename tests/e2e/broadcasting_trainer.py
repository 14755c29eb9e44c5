"""A trainer that broadcasts weights by gloo, as those of vLLM do by NCCL.

As a program it vanishes in the middle of an update: `broadcasting_trainer.py URL FILE BROADCASTS`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.ports import free_port

TIMEOUT_S = 120
TIMEOUT = dt.timedelta(seconds=TIMEOUT_S)
_READ = ("/is_paused", "/get_world_size", "/weight_info")


def call(address: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and answer. Without a body it has no content type, as calls of vLLM's client."""
    with contextlib.closing(HTTPConnection(address, timeout=TIMEOUT_S)) as connection:
        if body is not None:
            headers["content-type"] = "application/json"
        method = "GET" if path in _READ else "POST"
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


class Trainer:
    """Rank 0 of a group."""

    def __init__(self, address: str, token: str, packed_bytes: int) -> None:
        self.address, self.packed_bytes = address, packed_bytes
        # So many bytes fewer than announced are sent of each tensor.
        self.cut = 0
        self.headers = {"authorization": f"Bearer {token}"} if token else {}

    def call(self, path: str, body: Any = None) -> Any:
        """The answer, or its error."""
        _, answer = call(self.address, path, body, **self.headers)
        return answer.get("error", answer)

    def call_while(self, work: Callable[[], object], path: str, body: Any) -> Any:
        """Collectives of both sides wait for each other."""
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(self.call, path, body)
            work()
            return answer.result()

    def join(self) -> Any:
        # Of a trainer that has just vanished the server may still drop what it has received.
        while self.call("/shutdown_weight_transfer_engine").get("code") == "loading":
            time.sleep(0.1)
        host, port = "127.0.0.1", free_port()
        info = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": 2}
        if self.packed_bytes:
            packed = {"packed_buffer_size_bytes": self.packed_bytes, "packed_num_buffers": 2}
            info |= {"packed": True, **packed}
        address = f"tcp://{host}:{port}"
        join = dist.init_process_group
        return self.call_while(
            lambda: join("gloo", init_method=address, rank=0, world_size=2, timeout=TIMEOUT),
            "/init_weight_transfer_engine",
            {"init_info": info},
        )

    def update(self, weights: Mapping[str, torch.Tensor], *, announce: bool = True, count: int = -1) -> Any:
        """What the call is answered. After `count` broadcasts the process ends."""
        announced = {
            "names": [*weights],
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in weights.values()],
            "shapes": [[*each.shape] for each in weights.values()],
        }

        def send() -> None:
            # Without a group any more it has been told why.
            with contextlib.suppress(RuntimeError):
                for number, pack in enumerate(self._packs(weights)):
                    if number == count:
                        os._exit(0)
                    dist.broadcast(pack[: len(pack) - self.cut], 0)

        return self.call_while(send, "/update_weights", {"update_info": announced if announce else {}})

    def push(self, weights: Mapping[str, torch.Tensor], **options: Any) -> Any:
        """One update. The answer of its end, or the first error."""
        for answer in (self.call("/start_weight_update"), self.update(weights, **options)):
            if "code" in answer:
                return answer
        return self.call("/finish_weight_update")

    def _packs(self, weights: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        pack: list[torch.Tensor] = []
        for weight in weights.values():
            pack.append(weight.contiguous().view(-1).view(torch.uint8))
            if sum(each.numel() for each in pack) > self.packed_bytes:
                yield torch.cat(pack)
                pack = []
        if pack:
            yield torch.cat(pack)


@contextlib.contextmanager
def joined(address: str, token: str = "", packed_bytes: int = 0) -> Iterator[Trainer]:
    trainer = Trainer(address, token, packed_bytes)
    answer = trainer.join()
    assert answer == {"message": "Weight transfer initialized"}, answer
    try:
        yield trainer
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    with joined(sys.argv[1]) as leaving:
        leaving.push(load_file(sys.argv[2]), count=int(sys.argv[3]))
