"""The module of a task process whose tasks are Python: what hostile code can do in it, if it gets there."""

from __future__ import annotations

from collections.abc import Callable


def handle(task: bytes) -> bytes:
    scope: dict[str, object] = {}
    try:
        exec(task, scope)
    except OSError as error:
        return f"{type(error).__name__} {error.errno}".encode()
    return str(scope.get("result", "done")).encode()


def handler() -> Callable[[bytes], bytes]:
    return handle
