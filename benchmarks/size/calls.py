"""Python function calls per token, and the path of a Decode, traced in a running gateway and its worker.

Both run with `hook/sitecustomize.py`, which counts. The weightless executor computes, so that nothing of a
model is counted. Timers stand still, and steps come one by one, each after the one before has left no work
behind, so that neither the clock nor the machine's speed matters. A function counts by its median over the
steps: what is done in few of them only, such as compacting the journal, does not. Calls have no deadline,
which would cost each item some functions more.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

from quire.v1 import executor_pb2

from benchmarks.checkout import ROOT
from benchmarks.drivers import Caller
from benchmarks.gateway_process import GatewayProcess

ROLES = ("gateway", "worker")
ITEMS = 32
_HOOK = Path(__file__).with_name("hook")
_SETTLING_STEPS = 8
_STEPS = 17
# If nothing was called for this long, twice, a step has left no work behind.
_QUIET_S = 0.01
_MOST_LOOKS = 200
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Use:
    """A function that takes a value of a type as an argument, or sets its attributes."""

    file: str
    function: str
    variable: str
    type: str


class CountedServer:
    """A gateway with one worker, with counted calls of Python functions. Use as a context manager."""

    def __init__(self, *flags: str, program: type[GatewayProcess] = GatewayProcess) -> None:
        """`flags`: more of them for the gateway. `program`: how it is started."""
        self._flags = flags
        self._program = program
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            # In memory, because a disk that is full or slow would change what is called.
            memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - for the directory below
            directory = tempfile.TemporaryDirectory(prefix="quire-calls-", dir=memory)
            self._directory = Path(stack.enter_context(directory))
            path = os.pathsep.join([str(_HOOK), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
            with mock.patch.dict(os.environ, {"PYTHONPATH": path, "COUNTED_CALLS_DIR": str(self._directory)}):
                # With a journal on disk, as in production.
                flags = ["--no-self-check", "--data-dir", str(self._directory / "data"), *self._flags]
                self.gateway = stack.enter_context(self._program(model="paged-attention", flags=flags))
                # Its timers are stopped, so that it could not drain. Its worker exits with it.
                stack.callback(self.gateway.process.kill)
            # Timers stand still from now on.
            for role in ROLES:
                self._ask(role)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def calls_per_step(self, step: Callable[[], object]) -> dict[str, Counter[str]]:
        """How often a step calls each function, by the process."""
        for _ in range(_SETTLING_STEPS):
            step()
        self._calls_until_quiet()
        seen: dict[str, list[Counter[str]]] = {role: [] for role in ROLES}
        for _ in range(_STEPS):
            step()
            for role, calls in self._calls_until_quiet().items():
                seen[role].append(calls)
        return {role: _medians(steps) for role, steps in seen.items()}

    def uses(self, step: Callable[[], object]) -> set[Use]:
        """Which functions use values of which types, in either process, during some steps.

        Only those that do so in each of two looks: a timer that ran when timers were stopped goes off once.
        """
        looks = []
        for _ in range(2):
            for role in ROLES:
                self._ask(role, is_looking=True)
            for _ in range(2 * _SETTLING_STEPS):
                step()
                time.sleep(_QUIET_S)
            looks.append({Use(*use) for role in ROLES for use in self._ask(role)["uses"]})
        return looks[0] & looks[1]

    def _calls_until_quiet(self) -> dict[str, Counter[str]]:
        calls = {role: Counter[str]() for role in ROLES}
        quiet = 0
        for _ in range(_MOST_LOOKS):
            quiet += 1
            for role in ROLES:
                if new := self._ask(role)["calls"]:
                    calls[role].update(new)
                    quiet = 0
            if quiet == 2:
                break
            time.sleep(_QUIET_S)
        return calls

    def _ask(self, role: str, *, is_looking: bool = False) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._directory / role))
            connection.sendall(b"t" if is_looking else b"c")
            parts = []
            while part := connection.recv(_CHUNK_BYTES):
                parts.append(part)
        answer: dict[str, Any] = json.loads(b"".join(parts))
        return answer


def _medians(steps: Sequence[Counter[str]]) -> Counter[str]:
    functions = set().union(*steps)
    medians = {function: statistics.median_low(step[function] for step in steps) for function in functions}
    return Counter({function: count for function, count in medians.items() if count})


def most_called(calls: Counter[str], tokens: int, at_most: int) -> list[str]:
    """The functions that are called most often per token, as lines."""
    return [
        f"{count / tokens:8.1f}  {name.removeprefix(f'{ROOT}/')}"
        for name, count in calls.most_common(at_most)
    ]


@contextlib.contextmanager
def decodes(server: CountedServer) -> Iterator[dict[str, tuple[Callable[[], object], int]]]:
    """The measured ways to decode: a step of each, and its number of tokens."""
    stub = server.gateway.stub

    def caller(prompt_len: int) -> Caller:
        prompt = executor_pb2.PrefillRequest(token_ids=range(1, prompt_len + 1))
        response = stub.Prefill(prompt)
        return Caller(response.kv_cache.cache_id, prompt_len, response.output.token_id)

    # With different lengths, so that the same number of sequences starts a page in each step.
    callers = [caller(length) for length in range(ITEMS, 2 * ITEMS)]
    alone, on_session = caller(ITEMS), caller(ITEMS)

    def batch() -> None:
        request = executor_pb2.BatchDecodeRequest(items=[one.request() for one in callers])
        for one, result in zip(callers, stub.BatchDecode(request).results, strict=True):
            one.took(result.response)

    requests: queue.SimpleQueue[executor_pb2.SessionRequest | None] = queue.SimpleQueue()
    session = stub.Session(iter(requests.get, None))

    def step_session() -> None:
        call = executor_pb2.SessionCall(decode=on_session.request())
        requests.put(executor_pb2.SessionRequest(calls=[call]))
        on_session.took(next(session).results[0].decode)

    try:
        yield {
            f"item of a BatchDecode of {ITEMS}": (batch, ITEMS),
            "unary Decode": (lambda: alone.took(stub.Decode(alone.request())), 1),
            "Decode on a Session": (step_session, 1),
        }
    finally:
        requests.put(None)
