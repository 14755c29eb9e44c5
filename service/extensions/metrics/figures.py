"""Measurements for metrics: durations of appends, calls, executions and commits, and delays of the loop.

They are used on the event loop only, so they need no locks: adding a value takes 0.1 us; to a histogram of
prometheus_client, 1.3 us. Nothing is measured without the setting `metrics_listen`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from prometheus_client.metrics_core import HistogramMetricFamily
from quire.v1 import admin_pb2, executor_pb2, runner_pb2

from service.api.append_codec import done_of
from service.api.grpc_services import methods_of
from service.caches.requests import DECODE, PREFILL, VERIFY, Append, Appended, AppendKind, Request
from service.dispatcher import OnOutcomes, Outcome, Outcomes
from service.errors import QuireError

# Upper bounds of buckets in seconds: near vLLM's, finer for small models; go-grpc-prometheus's; for delays.
TIMES_S = (
    .001, .0025, .005, .01, .025, .05, .075, .1, .15, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
    2560,
)  # fmt: skip
CALLS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
PAUSES_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

_LAG_INTERVAL_S = 0.1
_TYPES = ("unary", "server_stream"), ("client_stream", "bidi_stream")
_Behaviour = Callable[[Any, Any], Awaitable[Any]]


class Distribution:
    """A histogram of seconds."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._total_s = 0.0

    def add(self, value_s: float) -> None:
        self._counts[bisect_left(self._bounds_s, value_s)] += 1
        self._total_s += value_s

    def write(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds the histogram to a metric family."""
        bounds = [*(str(float(bound_s)) for bound_s in self._bounds_s), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        family.add_metric(labels, buckets, self._total_s)


class Totals:
    """Sums of counts that restart at 0, such as those of a worker with each start. No I/O.

    A sum never decreases, and is kept by label and name. A source, such as one start of a worker, counts from
    0 once. When it is gone, its last counts stay in the sum.
    """

    def __init__(self) -> None:
        self._gone: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._last: dict[Hashable, tuple[str, Counter[str]]] = {}

    def update(self, sources: Mapping[Hashable, tuple[str, Mapping[str, int]]]) -> None:
        """Updates the sums with the counts of all current sources, each with its label."""
        for source, (label, counts) in sources.items():
            # An older snapshot of a worker can arrive after a newer one.
            _, last = self._last.get(source, (label, Counter[str]()))
            self._last[source] = label, last | Counter(counts)
        for source in self._last.keys() - sources.keys():
            label, last = self._last.pop(source)
            self._gone[label] += last

    def by_label(self) -> dict[str, Counter[str]]:
        sums = {label: counts.copy() for label, counts in self._gone.items()}
        for label, counts in self._last.values():
            sums.setdefault(label, Counter()).update(counts)
        return sums


class Appends:
    """Counts appends that were answered, from calls, Sessions and executions."""

    def __init__(self) -> None:
        # Counts by kind, and of failed ones by reason.
        self.answered = [0] * (max(AppendKind) + 1)
        self.failed: Counter[str] = Counter()
        self.prompt_tokens = self.generated_tokens = 0
        # Counts for verifies that keep only accepted tokens, including those of Execute.
        self.draft_tokens = self.accepted_tokens = 0
        # From the request until it is durable and answered. An append of several tokens adds one value: its
        # time per token.
        self.first_token, self.token = Distribution(TIMES_S), Distribution(TIMES_S)
        # How long prompts waited in their workers.
        self.queue = Distribution(TIMES_S)

    def observing(self, requests: Sequence[Request], on_outcomes: OnOutcomes) -> OnOutcomes:
        """Returns a wrapper of `on_outcomes` that also counts."""
        begun_s = time.monotonic()

        def observe(found: Outcomes) -> None:
            on_outcomes(found)
            took_s = time.monotonic() - begun_s
            for index, outcome in found:
                append = requests[index]
                if type(append) is Append:
                    self._count(append, outcome, took_s)

        return observe

    def _count(self, append: Append, outcome: Outcome, took_s: float) -> None:
        if type(outcome) is not Appended:
            if isinstance(outcome, QuireError):
                self.failed[outcome.reason] += 1
            return
        kind = append.kind
        self.answered[kind] += 1
        if kind is DECODE or kind is VERIFY:
            # A decode of Execute can keep several, too.
            self.generated_tokens += outcome.kept
            self.token.add(took_s / outcome.kept)
            if append.accept:
                self.draft_tokens += len(append.token_ids) - 1
                self.accepted_tokens += outcome.kept - 1
        else:
            self.prompt_tokens += len(append.token_ids)
            if kind is PREFILL and append.rows:
                self.generated_tokens += 1
                self.first_token.add(took_s)
                self.queue.add(done_of(outcome).timing.queue_ns / 1e9)


class Calls:
    """Counts gRPC calls by type, service and method, as go-grpc-prometheus does."""

    def __init__(self) -> None:
        self._labels = {
            name: (_TYPES[of.client_streaming][of.server_streaming], of.containing_service.full_name, of.name)
            for name, of in methods_of(admin_pb2, executor_pb2, runner_pb2, health_pb2).items()
        }
        self.started: Counter[tuple[str, ...]] = Counter()
        # The labels, and the status code.
        self.handled: Counter[tuple[str, ...]] = Counter()
        self.seconds: defaultdict[tuple[str, ...], Distribution] = defaultdict(lambda: Distribution(CALLS_S))

    def observing(self, method: str, behaviour: _Behaviour) -> _Behaviour:
        """Returns a wrapper of a behaviour that also counts."""
        # A caller without a token can name any method: labels must stay bounded.
        labels = self._labels.get(method, ("unknown", "unknown", "unknown"))
        seconds = self.seconds[labels]

        async def handle(messages: Any, context: Any) -> Any:
            began_s, code = time.monotonic(), "OK"
            self.started[labels] += 1
            try:
                return await behaviour(messages, context)
            except BaseException as error:
                code = _code_of(error, context)
                raise
            finally:
                self.handled[*labels, code] += 1
                seconds.add(time.monotonic() - began_s)

        return handle


def _code_of(error: BaseException, context: Any) -> str:
    """The status code of a call that raised, by its name in Go."""
    code = context.code()
    if isinstance(error, asyncio.CancelledError):
        return "Canceled"
    name = code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"
    return name.title().replace("_", "")


class Figures:
    """All measurements."""

    def __init__(self) -> None:
        self.appends = Appends()
        self.calls = Calls()
        self.commits, self.lag = Distribution(PAUSES_S), Distribution(PAUSES_S)
        # Durations by runtime.
        self.executions: defaultdict[str, Distribution] = defaultdict(lambda: Distribution(TIMES_S))

    def execution_ended(self, runtime: str, took_s: float) -> None:
        """Adds an execution, which may have failed. `runtime`: empty if it failed before it had one."""
        self.executions[runtime or "none"].add(took_s)

    async def watch_lag(self) -> None:
        """Measures by how much the event loop delays a timer, until cancelled."""
        while True:
            due_s = time.monotonic() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.lag.add(max(0.0, time.monotonic() - due_s))
