"""`quire top`: follows a server in a terminal, also where the server goes away and comes back.

Calls are made on a thread of their own, so that keys are answered while the server does not answer.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from quire import Client, QuireError
from quire.cli.connecting import connected, connection, converting_failures, line_of, new_client
from quire.cli.status import UNLIMITED_WIDTH, duration, resident_adapters, seconds
from quire.cli.top_view import Reading, frame
from quire.v1 import executor_pb2
from rich.console import Console, RenderableType
from rich.live import Live

_TIMEOUT_S = 5.0
# How often the display follows keys and the size of the terminal.
_TICK_S = 0.2
# How long it is said that the server answers again.
_NEWS_S = 10.0
_PAGE_SIZE = 200


def show_top(options: argparse.Namespace) -> int:
    """Shows the server until q, Ctrl-C or SIGTERM. Returns the exit status. Raises CommandFailed."""
    console = Console()
    if not console.is_terminal:
        console.width = UNLIMITED_WIDTH
    if options.once:
        with connected(options) as client:
            before = read(client)
            time.sleep(options.interval)
            console.print(frame(read(client), before, options.target))
        return 0
    connect = functools.partial(new_client, Client, connection(options), timeout_s=_TIMEOUT_S)
    poller = _Poller(connect, options.interval)
    poller.start()
    try:
        first = poller.replies.get()
        with converting_failures(options):
            if isinstance(first, QuireError):
                raise first
        view = _View(first, options.target)
        if console.is_terminal:
            _follow_on_screen(view, poller, console)
        while not console.is_terminal:
            console.print(view.frame())
            view.take(poller.replies.get())
    except KeyboardInterrupt:
        pass  # the usual end
    finally:
        poller.stop()
    return 0


def _follow_on_screen(view: _View, poller: _Poller, console: Console) -> None:
    """Draws until q, then restores the terminal."""
    # Its default would not restore the terminal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _keys() as key_within, Live(console=console, screen=True, auto_refresh=False) as live:
        while key_within(_TICK_S) not in ("q", "Q"):
            with contextlib.suppress(queue.Empty):
                while True:
                    view.take(poller.replies.get_nowait())
            live.update(view.frame(), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for a key, and returns it, or "" after a time. Ctrl-C is no key."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        never = threading.Event()
        yield lambda wait_s: "q" if never.wait(wait_s) else ""
        return
    import termios  # noqa: PLC0415 - not on Windows
    import tty  # noqa: PLC0415

    terminal = sys.stdin.fileno()

    def key_within(wait_s: float) -> str:
        if not select.select([terminal], [], [], wait_s)[0]:
            return ""
        # Nothing to read is the end of the terminal.
        return os.read(terminal, 1).decode("latin-1") or "q"

    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSANOW)
        yield key_within
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


class _View:
    """The last two readings, and what has become of the server since."""

    def __init__(self, first: Reading, target: str) -> None:
        self._now, self._target = first, target
        self._before: Reading | None = None
        self._failure: QuireError | None = None
        self._news, self._news_until_s = "", 0.0

    def take(self, reply: Reading | QuireError) -> None:
        """Adds a reading, or why there is none."""
        if isinstance(reply, QuireError):
            self._failure = reply
            return
        if self._failure is not None:
            is_new = seconds(reply.status.uptime) < seconds(self._now.status.uptime)
            away = duration(reply.taken_s - self._now.taken_s)
            self._news = f"{'a new server answers' if is_new else 'the server answers again'}, after {away}"
            self._news_until_s = reply.taken_s + _NEWS_S
        self._before, self._now, self._failure = self._now, reply, None

    def frame(self) -> RenderableType:
        """What to show now."""
        notes, now_s = [], time.monotonic()
        if self._failure is not None:
            old = duration(now_s - self._now.taken_s)
            notes = [f"no answer; these figures are {old} old", line_of(self._failure)]
        elif now_s < self._news_until_s:
            notes = [self._news]
        return frame(self._now, self._before, self._target, notes)


class _Poller(threading.Thread):
    """Asks again and again. Readings and failures go to `replies`."""

    def __init__(self, connect: Callable[[], Client], interval_s: float) -> None:
        """Raises WrongUsage, and OSError for an unreadable file."""
        super().__init__(name="top", daemon=True)
        self.replies: queue.SimpleQueue[Reading | QuireError] = queue.SimpleQueue()
        self._connect, self._interval_s, self._client = connect, interval_s, connect()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.replies.put(read(self._client))
            except QuireError as error:
                self.replies.put(error)
                # On the same connection gRPC would wait longer and longer before it tries again.
                self._client.close()
                self._client = self._connect()
            except ValueError:
                # `stop` has closed the connection.
                if not self._stopped.is_set():
                    raise
            self._stopped.wait(self._interval_s)

    def stop(self) -> None:
        """Ends the thread, and cancels its call."""
        self._stopped.set()
        self._client.close()
        self.join()
        self._client.close()


def read(client: Client) -> Reading:
    """Asks a server. Raises QuireError if it does not say its status."""
    status, taken_s = client.status(), time.monotonic()
    # Without a worker it could wait for one.
    is_ready = any(worker.state == executor_pb2.WORKER_STATE_READY for worker in status.workers)
    has_lora = any(worker.executor.supports_lora for worker in status.workers)
    model = _allowed(client.model_info) if is_ready else None
    lora = _allowed(client.lora_metrics) if has_lora else None
    page = executor_pb2.ListCachesRequest(page_size=_PAGE_SIZE)
    caches = _allowed(client.stub.ListCaches, page, timeout=_TIMEOUT_S, metadata=client.metadata)
    return Reading(
        status,
        taken_s,
        model_id="" if model is None else model.model.model_id,
        caches=None if caches is None else caches.kv_caches,
        has_more_caches=caches is not None and bool(caches.next_page_token),
        adapters={} if lora is None else resident_adapters(lora),
    )


def _allowed(call: Callable[..., Any], *request: Any, **options: Any) -> Any:
    """The answer of a call that may be refused, as without its role. None: it was."""
    try:
        return call(*request, **options)
    except (QuireError, grpc.RpcError):
        return None
