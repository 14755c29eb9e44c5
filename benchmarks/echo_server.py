"""A bare grpc.aio server for comparison: `python -m benchmarks.echo_server < answers.json`.

Answers each method in its standard input, {method: base64 of the response}, with these bytes. It parses and
computes nothing, and uses the same event loop as the gateway. So it measures the cost of gRPC in Python for
messages of these sizes. Prints its port. Exits when it is killed or its standard input ends.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import uvloop

_Handler = Callable[[bytes, Any], Awaitable[bytes]]


async def main() -> None:
    """Serves until the input ends."""
    answers = {method: base64.b64decode(text) for method, text in json.loads(sys.stdin.readline()).items()}
    service = {method.rpartition("/")[0] for method in answers}
    handlers: dict[str, Any] = {
        method.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(_echo(answer))
        for method, answer in answers.items()
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name.strip("/"), handlers) for name in service]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


def _echo(answer: bytes) -> _Handler:
    async def handle(request: bytes, context: Any) -> bytes:  # noqa: ARG001 - a handler
        return answer

    return handle


if __name__ == "__main__":
    uvloop.run(main())
