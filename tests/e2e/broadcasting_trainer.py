"""A trainer that broadcasts a model's weights by gloo: `broadcasting_trainer.py OPTIONS`, as JSON.

It prints what each of its calls is answered.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
import torch.distributed as dist
from safetensors.torch import load_file


def call(options: dict[str, Any], path: str, body: dict[str, Any] | None = None) -> Any:
    """Without a body it has no content type, as the calls of vLLM's client."""
    request = Request(options["url"] + path, method="POST")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    if options.get("token"):
        request.add_header("authorization", f"Bearer {options['token']}")
    try:
        with urlopen(request, timeout=100) as response:
            answer = json.load(response)
    except HTTPError as error:
        answer = {"status": error.code, **json.load(error)["error"]}
    print(json.dumps(answer), flush=True)
    return answer


def call_while(work: Callable[[], object], options: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(call, options, path, body)
        work()
        answer.result()


def broadcast(weights: dict[str, torch.Tensor], packed_bytes: int, count: int | None) -> None:
    """`count`: of broadcasts, after which it vanishes."""
    packs: list[list[torch.Tensor]] = [[]]
    for weight in weights.values():
        packs[-1].append(weight.contiguous().view(-1).view(torch.uint8))
        if sum(each.numel() for each in packs[-1]) > packed_bytes:
            packs.append([])
    for number, pack in enumerate(filter(None, packs)):
        if number == count:
            os._exit(0)
        dist.broadcast(torch.cat(pack), 0)


def main(options: dict[str, Any]) -> None:
    host, port, packed_bytes = "127.0.0.1", options["port"], options.get("packed_bytes", 0)
    info = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": 2}
    if packed_bytes:
        info |= {"packed": True, "packed_buffer_size_bytes": packed_bytes, "packed_num_buffers": 2}
    address = f"tcp://{host}:{port}"

    def join() -> None:
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=2)

    call_while(join, options, "/init_weight_transfer_engine", {"init_info": info})
    weights = load_file(options["model"])
    parts = (
        [weights]
        if not options.get("parts")
        else [dict(list(weights.items())[first :: options["parts"]]) for first in range(options["parts"])]
    )
    for number in range(options.get("updates", 1)):
        if options.get("pause"):
            call(options, f"/pause?mode={options['pause']}&clear_cache=false")
        call(options, "/start_weight_update")
        for part in parts:
            announced = {
                "names": [*part],
                "dtype_names": [str(each.dtype).removeprefix("torch.") for each in part.values()],
                "shapes": [[*each.shape] for each in part.values()],
            }
            if number:
                # The same as before.
                announced = {}
                part = {name: weight * options["factor"] for name, weight in part.items()}

            def send(part: dict[str, torch.Tensor] = part) -> None:
                broadcast(part, packed_bytes, options.get("vanishes_after"))

            call_while(send, options, "/update_weights", {"update_info": announced})
        if options.get("vanishes_before_the_end"):
            os._exit(0)
        call(options, "/finish_weight_update", options.get("finish"))
        if options.get("pause"):
            call(options, "/resume")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
