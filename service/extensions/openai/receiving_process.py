"""The process that receives a trainer's broadcasts for the gateway. See `workers.weight_receiver`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

from service.errors import HelperFailed, LoadFailed
from service.logging import get_logger
from workers.common import child_process

_log = get_logger(__name__)
_PROGRAM = "workers.weight_receiver"
_MAX_LINE_BYTES = 1 << 16


class ReceivingProcess:
    """Owner of the process. Sends it commands."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> ReceivingProcess:
        """Starts the process. Raises HelperFailed."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", _PROGRAM),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_LINE_BYTES,
                env=os.environ | {"PYTHONPATH": child_process.import_path()},
                cwd=child_process.DIRECTORY,
            )
        except OSError:
            _log.exception("weights cannot be received")
            raise HelperFailed from None
        return cls(process)

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def told(self, command: dict[str, Any], answer: str, timeout_s: float, first_s: float = 0) -> None:
        """Sends a command, and waits for its answer. Raises LoadFailed.

        `timeout_s`: the longest silence of the process; `first_s`: the same at the beginning, if longer.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        wait_s = max(timeout_s, first_s)
        try:
            # In a thread: the command may name a hundred thousand tensors.
            stdin.write(await asyncio.to_thread(_line, command))
            async with asyncio.timeout(wait_s):
                await stdin.drain()
            while True:
                async with asyncio.timeout(wait_s):
                    line = await stdout.readline()
                said = json.loads(line) if line else {"error": "the process that receives them has ended"}
                if "error" in said:
                    raise LoadFailed(f"the weights were not received: {said['error']}")
                if answer in said:
                    return
                wait_s = timeout_s
        except TimeoutError:
            raise LoadFailed(f"the trainer sent nothing for {wait_s:g} seconds") from None
        except ConnectionError:
            raise LoadFailed("the weights were not received: the process has ended") from None

    async def end(self) -> None:
        """Kills the process, whatever it is waiting for."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


def _line(command: dict[str, Any]) -> bytes:
    return json.dumps(command).encode() + b"\n"
