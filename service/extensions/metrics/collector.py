"""All metrics, computed at each scrape, mostly from the state of the gateway's parts.

docs/operations.md explains each. Labels have a bounded number of values, and none names a tenant, a cache, a
path, or an adapter that belongs to a tenant.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from prometheus_client import Metric, metrics_core
from prometheus_client.registry import Collector
from quire.v1 import executor_pb2, runner_pb2

from service.caches.requests import AppendKind
from service.extension import GatewayParts
from service.extensions.metrics.figures import Distribution, Figures, Totals

# The most adapters that one label names.
_MOST_NAMES = 64
_READY = executor_pb2.WORKER_STATE_READY
_CALL = ("grpc_type", "grpc_service", "grpc_method")
# Counters in alerts (docs/monitoring/alerts.yaml) exist from 0 on: rate() and increase() do not see the first
# value of a series.
_ALERTED_CODES = ("Internal", "Unknown")
_ALERTED_REASONS = ("QUEUE_FULL", "OVERLOADED", "KV_EXHAUSTED", "JOURNAL_UNAVAILABLE", "JOURNAL_FULL")
# Fields of a WorkerSlot.
_WORKER_GAUGES = {
    "quire_worker_suspect": ("suspect", "1 if it has been silent."),
    "quire_worker_memory_bytes": ("snapshot.memory_bytes", "Resident memory."),
    "quire_worker_device_memory_bytes": ("snapshot.device_memory_bytes", "Device memory."),
    "quire_worker_step_age_seconds": ("snapshot.step_age_ns", "How long the current step has run."),
    "quire_worker_sequences": ("snapshot.pool.sequences", "Caches whose KV it has."),
    "quire_kv_disk_bytes": ("snapshot.kv_disk.bytes", "All files in its kv_disk."),
    "quire_kv_disk_stopped": ("snapshot.kv_disk.stopped", "1 if it stores nothing in its kv_disk."),
    "quire_kv_disk_unwritten_pages": (
        "snapshot.kv_disk.unwritten_pages",
        "Pages in memory that are still to be stored.",
    ),
}
# Fields of a WorkerSnapshot.
_WORKER_COUNTS = {
    "quire_steps": ("counts.steps", "Steps."),
    "quire_step_tokens": ("counts.step_tokens", "Tokens in these steps."),
    "quire_step_items": ("counts.batch_items", "Items in these steps: by quire_steps_total the mean batch."),
    "quire_prefix_cache_queries": ("pool.prefix_query_tokens", "Prompt tokens that were looked up."),
    "quire_prefix_cache_hits": ("pool.prefix_hit_tokens", "Prompt tokens whose KV was found."),
    "quire_kv_evicted_pages": ("pool.evicted_pages", "Cached pages that were evicted."),
    "quire_kv_copied_pages": ("pool.copied_pages", "Pages that were copied on write."),
    "quire_kv_disk_wanted_pages": ("kv_disk.wanted_pages", "Full pages that were not in memory."),
    "quire_kv_disk_read_pages": ("kv_disk.read_pages", "Those of them that were read from kv_disk."),
    "quire_kv_disk_refused_pages": ("kv_disk.refused_pages", "Files that were not what their name says."),
    "quire_kv_disk_written_pages": ("kv_disk.written_pages", "Pages that were stored in kv_disk."),
    "quire_kv_disk_dropped_pages": (
        "kv_disk.dropped_pages",
        "Pages that left the memory and were not stored.",
    ),
}
# Fields of LoraAdapterMetrics.
_ADAPTER_COUNTS = {
    "quire_adapter_loads": ("loads", "Adapters that were put into its memory."),
    "quire_adapter_evictions": ("evictions", "Adapters that were evicted from its memory."),
}


class QuireCollector(Collector):
    """Computes the metrics. Runs on the event loop."""

    def __init__(self, parts: GatewayParts, figures: Figures) -> None:
        self._parts = parts
        self._figures = figures
        self._totals = Totals()
        # Reads the last counts of a worker that has died.
        parts.shards()[0].versions.subscribe(self._count)

    def collect(self) -> Iterator[Metric]:
        """Yields all metric families, including those without a value."""
        yield from self._requests()
        yield from self._times()
        yield from self._gateway()
        yield from self._workers()
        yield from self._adapters()
        calls = self._figures.calls
        yield _counter("grpc_server_started", "Calls that began.", calls.started, *_CALL)
        none = {(*labels, code): 0 for labels in calls.started for code in _ALERTED_CODES}
        ended = {**none, **calls.handled}
        yield _counter("grpc_server_handled", "Calls that ended.", ended, *_CALL, "grpc_code")

    def _requests(self) -> Iterator[Metric]:
        """Metrics with the names and meanings of vLLM's."""
        appends, shards = self._figures.appends, self._parts.shards()
        counts, first = shards[0].caches.parts.context.counts, shards[0].versions.first_ready
        running, waiting = running_and_waiting(self._parts)
        served = (slot for shard in shards for slot in shard.versions.slots)
        pools = [slot.snapshot.pool for slot in served if slot.state == _READY]
        total = sum(pool.pages_total for pool in pools)
        used = sum(pool.pages_referenced for pool in pools) / max(1, total)
        yield _gauge("quire_num_requests_running", "Appends that fit into the next steps.", running)
        yield _gauge("quire_num_requests_waiting", "Appends that wait for a later step.", waiting)
        yield _gauge("quire_kv_cache_usage_perc", "The part of KV pages in use, 0 to 1.", used)
        yield _counter("quire_num_preemptions", "Caches whose KV was preempted.", counts["preempted"])
        yield _counter("quire_prompt_tokens", "Prompt tokens of answered appends.", appends.prompt_tokens)
        yield _counter("quire_generation_tokens", "Tokens that were generated.", appends.generated_tokens)
        drafted, accepted = appends.draft_tokens, appends.accepted_tokens
        yield _counter("quire_spec_decode_num_draft_tokens", "Tokens that were drafted.", drafted)
        yield _counter("quire_spec_decode_num_accepted_tokens", "Drafted tokens that were kept.", accepted)
        described: dict[tuple[str, ...], int] = {}
        sizes: dict[tuple[str, ...], int] = {}
        if first is not None:
            model, executor = first.model, first.executor
            described[model.model_id, model.fingerprint] = 1
            sizes[str(executor.page_size_tokens), str(total)] = 1
        yield _gauge("quire_model_info", "What is served.", described, "model_name", "fingerprint")
        yield _gauge("quire_cache_config_info", "KV pages.", sizes, "block_size", "num_gpu_blocks")

    def _times(self) -> Iterator[Metric]:
        figures, appends = self._figures, self._figures.appends
        for name, text, one in (
            ("quire_time_to_first_token_seconds", "From a Prefill to its answer.", appends.first_token),
            ("quire_inter_token_latency_seconds", "From a Decode to its answer.", appends.token),
            ("quire_request_queue_time_seconds", "A Prefill's wait in its worker.", appends.queue),
            ("quire_journal_commit_seconds", "Until records are durable.", figures.commits),
            ("quire_event_loop_lag_seconds", "How late the event loop runs a timer.", figures.lag),
        ):
            yield _histogram(name, text, {(): one})
        text = "From an Execute to the end of its last sample."
        executions = {(runtime,): one for runtime, one in figures.executions.items()}
        yield _histogram("quire_e2e_request_latency_seconds", text, executions, "runtime")
        text = "From a call's begin to its end."
        yield _histogram("grpc_server_handling_seconds", text, figures.calls.seconds, *_CALL)

    def _gateway(self) -> Iterator[Metric]:
        state, figures, home = self._parts.state, self._figures, self._parts.shards()[0]
        caches = [shard.caches for shard in self._parts.shards()]
        connections = {("openai",): self._parts.num_http_connections()}
        if state.connections is not None and state.connections.count is not None:
            connections[("grpc",)] = state.connections.count
        states = _one_hot(executor_pb2.ServerState, "SERVER_STATE_", state.state)
        stall_s = state.watch.longest_stretch_s
        yield _gauge("quire_state", "1 for the current state.", states, "state")
        yield _gauge("quire_weights_version", "Number of the served weights.", home.versions.serving.number)
        in_flight = sum(one.operations_in_flight for one in caches)
        parked = sum(one.num_parked for one in caches)
        yield _gauge("quire_caches", "Caches.", sum(map(len, caches)))
        yield _gauge("quire_operations_in_flight", "Operations in all.", in_flight)
        yield _gauge("quire_operations_parked", "Those that wait for a worker or pages.", parked)
        running = sum(shard.runner.executions.num_unfinished for shard in self._parts.shards())
        yield _gauge("quire_executions_running", "Executions with unfinished samples.", running)
        yield _gauge("quire_sessions", "Open Sessions and other streams.", state.receiver.streams)
        yield _gauge("quire_connections", "Open connections.", connections, "port")
        yield _gauge("quire_arriving_requests", "Requests that have not arrived.", state.receiver.arriving)
        journal_bytes = sum(one.ledger.size_bytes for one in caches)
        yield _gauge("quire_journal_bytes", "The journal's contents.", journal_bytes)
        yield _gauge("quire_unread_bytes", "Answers computed or not yet read.", state.budgets.answers.used)
        yield _gauge("quire_event_loop_longest_stall_seconds", "The longest since the start.", stall_s)
        kinds = {kind.name.lower(): figures.appends.answered[kind] for kind in AppendKind}
        yield _counter("quire_appends", "Answered appends.", kinds, "kind")
        failed = {**dict.fromkeys(_ALERTED_REASONS, 0), **figures.appends.failed}
        yield _counter("quire_appends_failed", "Appends that failed.", failed, "reason")
        yield _counter("quire_refusals", "Refused calls.", state.call_log.refusals, "reason")
        replayed = home.caches.parts.context.counts["replayed_tokens"]
        yield _counter("quire_replayed_tokens", "Tokens whose lost KV was computed again.", replayed)
        breakers = {}
        for runtime in self._parts.runner.router.runtimes[1:]:
            breaker = _one_hot(runner_pb2.BreakerState, "BREAKER_STATE_", runtime.describe().breaker)
            breakers.update({(runtime.name, label): value for label, value in breaker.items()})
        text = "1 for the current state of a provider's circuit breaker."
        yield _gauge("quire_runtime_breaker", text, breakers, "runtime", "state")

    # Workers, by the index of their slot: workers of several model versions can share an index.

    def _count(self) -> None:
        sources: dict[Hashable, tuple[str, Mapping[str, int]]] = {}
        for slot in self._parts.slots():
            # Each worker belongs to one shard, and epochs are unique within a shard.
            index = str(slot.index)
            sources[index, slot.epoch] = index, _values(slot.snapshot, _WORKER_COUNTS)
            for adapter in slot.snapshot.lora_adapters:
                sources[index, slot.epoch, adapter.version] = index, _values(adapter, _ADAPTER_COUNTS)
        self._totals.update(sources)

    def _workers(self) -> Iterator[Metric]:
        self._count()
        slots = [(str(slot.index), slot) for slot in self._parts.slots()]
        ready = _summed((index, slot.state == _READY) for index, slot in slots)
        yield _gauge("quire_worker_ready", "Workers of this slot that serve.", ready, "worker")
        epochs = {index: slot.epoch for index, slot in sorted(slots, key=lambda one: one[1].epoch)}
        yield _gauge("quire_worker_epoch", "Number of the last start.", epochs, "worker")
        starts = {str(index): count for index, count in self._parts.shards()[0].versions.starts.items()}
        yield _counter("quire_worker_starts", "Starts, also with other weights.", starts, "worker")
        for name, (path, text) in _WORKER_GAUGES.items():
            scale = 1e-9 if path.endswith("_ns") else 1
            values = _summed((index, attrgetter(path)(slot) * scale) for index, slot in slots)
            yield _gauge(name, text, values, "worker")
        pages = _summed(
            ((index, state), getattr(slot.snapshot.pool, f"pages_{state}"))
            for index, slot in slots
            for state in ("free", "cached", "referenced")
        )
        yield _gauge("quire_kv_pages", "KV pages by their state.", pages, "worker", "state")
        totals = self._totals.by_label()
        for name, (_, text) in (_WORKER_COUNTS | _ADAPTER_COUNTS).items():
            yield _counter(name, text, {index: counts[name] for index, counts in totals.items()}, "worker")

    def _adapters(self) -> Iterator[Metric]:
        slots, first = self._parts.slots(), self._parts.shards()[0].versions.first_ready
        known = [(str(slot.index), one) for slot in slots for one in slot.snapshot.lora_adapters]
        none = [(str(slot.index), 0) for slot in slots]
        resident = _summed([*none, *((index, one.resident) for index, one in known)])
        yield _gauge("quire_adapters_resident", "Adapters in its memory.", resident, "worker")
        yield _gauge("quire_adapters", "Versions of adapters.", sum(1 for _ in self._parts.adapters))
        lists = {}
        if first is not None and first.executor.supports_lora:
            running = self._shared(one.version for _, one in known if one.resident)
            waiting = self._shared(one.version for _, one in known if one.waiting)
            lists[str(self._parts.state.config.max_lora_adapters), running, waiting] = time.time()
        labels = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
        yield _gauge("quire_lora_requests_info", "Adapters of all tenants; the time.", lists, *labels)

    def _shared(self, versions: Iterable[int]) -> str:
        """The ids of adapters that all tenants can use, as one label."""
        found = (self._parts.adapters.get(version) for version in set(versions))
        ids = sorted(one.adapter_id for one in found if one is not None and one.tenant is None)
        return ",".join(ids[:_MOST_NAMES])


def running_and_waiting(parts: GatewayParts) -> tuple[int, int]:
    """The number of appends that fit into the next steps of their workers, short ones first; and the rest."""
    config, machines = parts.state.config, [one.caches for one in parts.shards()]
    sizes: defaultdict[object, list[int]] = defaultdict(list)
    for shard, machine in enumerate(machines):
        for operation in machine.parts.attempts.running.values():
            sizes[shard, operation.entry.worker].append(len(operation.token_ids))
    running = 0
    ready = [slot.ready for slot in parts.slots() if slot.ready is not None]
    step_tokens = max((each.executor.max_batch_tokens for each in ready), default=0)
    for of_worker in sizes.values():
        left = config.max_batch_tokens or step_tokens
        for tokens in sorted(of_worker)[: config.max_batch_items]:
            running += left > 0
            left -= tokens
    return running, sum(len(each.parts.attempts.running) + each.num_parked for each in machines) - running


def _gauge(name: str, text: str, value: Any, *labels: str) -> Metric:
    return _with_values(metrics_core.GaugeMetricFamily(name, text, labels=labels), value)


def _counter(name: str, text: str, value: Any, *labels: str) -> Metric:
    return _with_values(metrics_core.CounterMetricFamily(name, text, labels=labels), value)


def _with_values(family: Any, value: Any) -> Metric:
    """Adds to a family one value, or values by one or several labels. Returns the family."""
    for labels, one in value.items() if isinstance(value, Mapping) else [((), value)]:
        family.add_metric((labels,) if isinstance(labels, str) else labels, float(one))
    return family  # type: ignore[no-any-return]


def _histogram(name: str, text: str, values: Mapping[Any, Distribution], *labels: str) -> Metric:
    family = metrics_core.HistogramMetricFamily(name, text, labels=labels)
    for of, distribution in values.items():
        distribution.write(family, of)
    return family


def _values(message: object, paths: Mapping[str, tuple[str, str]]) -> dict[str, int]:
    return {name: attrgetter(path)(message) for name, (path, _) in paths.items()}


def _summed(values: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    sums: defaultdict[Any, float] = defaultdict(float)
    for labels, value in values:
        sums[labels] += value
    return sums


def _one_hot(states: Any, prefix: str, current: int) -> dict[str, int]:
    """1 for the current state of an enum and 0 for the others, by their names."""
    return {name.removeprefix(prefix).lower(): number == current for name, number in states.items() if number}
