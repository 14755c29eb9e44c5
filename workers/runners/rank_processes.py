"""The processes of the ranks 1 to N - 1 of a group: starting them, and noticing that one has ended.

Each has two Unix sockets to rank 0, without names. On the first, its standard input, it gets plans; when that
closes, it ends. On the other it gets questions, one at a time, and answers them. Does not load torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# How long a process may take to end.
_END_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class Questions:
    """One end of a socket for questions and answers: JSON objects, one in a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a question, or an answer. Raises OSError."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Wait for one. Raises EOFError if the other end has ended."""
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._file.close()
        self._connection.close()


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank's process, as rank 0 sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    plans: socket.socket
    questions: Questions


class RankProcesses:
    """Owner of the other ranks' processes, which end with this one, and with the thread that started them."""

    def __init__(self, ranks: int, arguments: Sequence[str], on_end: Callable[[], None]) -> None:
        """Start them.

        Args:
            ranks: N.
            arguments: Further ones for `workers.follower`.
            on_end: Called on a thread of its own when a process has ended by itself, with all its work.
        """
        self.ranks = ranks
        self._is_closing = False
        self._on_end = on_end
        self.others = [self._start(rank, arguments) for rank in range(1, ranks)]
        self._watchers = [
            threading.Thread(target=self._watch, args=(other,), name=f"rank-{other.rank}-watch", daemon=True)
            for other in self.others
        ]
        for watcher in self._watchers:
            watcher.start()

    def _start(self, rank: int, arguments: Sequence[str]) -> RankProcess:
        plans, its_plans = socket.socketpair()
        questions, its_questions = socket.socketpair()
        with its_plans, its_questions:
            command = [sys.executable, "-m", "workers.follower", "--rank", str(rank), *arguments]
            process = subprocess.Popen(  # noqa: S603 - our own program
                [*command, "--ranks", str(self.ranks), "--questions", str(its_questions.fileno())],
                stdin=its_plans.fileno(),
                pass_fds=(its_questions.fileno(),),
            )
        return RankProcess(rank, process, plans, Questions(questions))

    def _watch(self, other: RankProcess) -> None:
        status = other.process.wait()
        if not self._is_closing:
            _log.error("rank %d has ended (status %d), so the others end too", other.rank, status)
            self._on_end()

    def close(self) -> None:
        """End the processes and wait for that. Those that do not end by themselves are killed."""
        self._is_closing = True
        for other in self.others:
            other.plans.close()
            with contextlib.suppress(OSError):
                other.questions.close()
        for other, watcher in zip(self.others, self._watchers, strict=True):
            watcher.join(_END_TIMEOUT_S)
            if watcher.is_alive():
                other.process.kill()
                # Not for ever: a process can be stuck in a device's driver, where no signal reaches it.
                watcher.join(_END_TIMEOUT_S)
