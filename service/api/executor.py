"""ModelExecutorService: the data calls as the table of calls declares them, and the readers.

Errors are raised as QuireError; the call interceptor turns them into a status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import metadata
from typing import Any

import grpc
from google.protobuf.message import Message
from quire.v1 import executor_pb2

from service.api import answers, validation
from service.api.calls import CALLS, Call
from service.api.server_state import ServerState
from service.api.session import Session, SessionContext
from service.dispatcher import Dispatcher
from service.doors.doors import current_tenant
from service.errors import InvalidArgument
from service.logging import current_request_id
from service.pool.base import WorkerSlot
from service.pool.supervisor import Supervisor

_LIMITS = executor_pb2.GatewayLimits.DESCRIPTOR.fields
# What a handler is given; it asks only how much time the caller has left.
Context = grpc.aio.ServicerContext[Any, Any]


class ExecutorApi:
    """The public data and reader RPCs; the data calls are added below, from the table."""

    def __init__(self, dispatcher: Dispatcher, state: ServerState, pool: Supervisor) -> None:
        self._dispatcher = dispatcher
        self._state = state
        self._pool = pool
        self._sessions: set[Session] = set()
        self._version = metadata.version("quire-llm-server")

    async def run(self, call: Call, request: Message, context: Context) -> Message:
        """Runs one call of the table."""
        await self._state.first_worker(context.time_remaining())
        timeout_s = validation.timeout_seconds(context.time_remaining())
        plan = await call.plan(request, self._state.limits, timeout_s)
        self._state.answers.take_until_done(plan.answer_bytes, context)
        outcomes = await self._dispatcher.run(plan.requests, current_tenant())
        return plan.answer(outcomes, current_request_id())

    async def Session(
        self, request_iterator: AsyncIterator[executor_pb2.SessionRequest], context: SessionContext
    ) -> None:
        session = Session(self._dispatcher, self._state, context)
        self._sessions.add(session)
        try:
            await session.run(request_iterator)
        finally:
            self._sessions.discard(session)

    def end_sessions(self) -> None:
        """Lets no session begin another call; each ends when its calls are answered."""
        for session in self._sessions:
            session.drain()

    # Readers.

    async def ListCaches(
        self, request: executor_pb2.ListCachesRequest, context: Context
    ) -> executor_pb2.ListCachesResponse:
        after = _page_start(request.page_token)
        size = min(request.page_size or validation.DEFAULT_PAGE_SIZE, validation.MAX_PAGE_SIZE)
        self._state.answers.take_until_done(size * validation.HANDLE_BYTES, context)
        response = executor_pb2.ListCachesResponse()
        last = 0
        for number, handle in self._dispatcher.handles(after, current_tenant()):
            if len(response.kv_caches) == size:
                response.next_page_token = str(last)
                break
            answers.write_handle(handle, response.kv_caches.add())
            last = number
        return response

    async def GetModelInfo(
        self, request: executor_pb2.GetModelInfoRequest, context: Context
    ) -> executor_pb2.GetModelInfoResponse:
        ready = self._state.first_ready
        tokenizer_json = ready.tokenizer_json if request.include_tokenizer else b""
        wants_template = request.include_chat_template and ready.chat_template.sources
        chat_template = ready.chat_template if wants_template else None
        # At most: special tokens are sent in any case, and with a template twice.
        template_bytes = ready.chat_template.ByteSize() * (2 if wants_template else 1)
        self._state.answers.take_until_done(len(tokenizer_json) + template_bytes, context)
        return executor_pb2.GetModelInfoResponse(
            model=ready.model,
            tokenizer_json=tokenizer_json,
            chat_template=chat_template,
            sampling_defaults=ready.sampling_defaults if ready.HasField("sampling_defaults") else None,
            device=ready.executor.device,
            special_tokens=ready.chat_template.special_tokens,
        )

    async def GetCapabilities(
        self, request: executor_pb2.GetCapabilitiesRequest, context: Context
    ) -> executor_pb2.GetCapabilitiesResponse:
        ready, config = self._state.first_ready, self._state.config
        return executor_pb2.GetCapabilitiesResponse(
            version=self._version,
            executor=ready.executor,
            limits={field.name: getattr(config, field.name) for field in _LIMITS},
            max_top_logprobs=min(validation.MAX_TOP_LOGPROBS, ready.model.vocab_size),
        )

    async def GetStatus(
        self, request: executor_pb2.GetStatusRequest, context: Context
    ) -> executor_pb2.GetStatusResponse:
        await self._pool.refresh_snapshots()
        return executor_pb2.GetStatusResponse(
            state=self._state.state,
            workers=[_worker_status(slot) for slot in self._pool.all_slots],
            uptime_ms=self._state.uptime_ms,
            caches=self._dispatcher.num_caches,
            operations_in_flight=self._dispatcher.operations_in_flight,
            memory_bytes=self._state.memory.resident_bytes(),
            version=self._version,
            tasks=len(asyncio.all_tasks()),
            longest_stall_ms=int(self._state.watch.longest_stretch_s * 1000),
            journal_bytes=self._dispatcher.journal_bytes,
            unread_bytes=self._state.answers.used_bytes,
            arriving_requests=self._state.reception.arriving,
            sessions=self._state.reception.streams,
            connections=self._state.guests.count,
            refusals=self._state.refusals.by_reason,
        )

    async def GetCacheMetrics(
        self, request: executor_pb2.GetCacheMetricsRequest, context: Context
    ) -> executor_pb2.GetCacheMetricsResponse:
        await self._pool.refresh_snapshots(check_integrity=request.check_integrity)
        response = executor_pb2.GetCacheMetricsResponse()
        for slot in self._pool.all_slots:
            worker = response.workers.add(worker_id=slot.worker_id, pool=slot.snapshot.pool)
            if slot.snapshot.HasField("pool_intact"):
                worker.pool_intact = slot.snapshot.pool_intact
        return response

    async def GetLoraMetrics(
        self, request: executor_pb2.GetLoraMetricsRequest, context: Context
    ) -> executor_pb2.GetLoraMetricsResponse:
        await self._pool.refresh_snapshots()
        response = executor_pb2.GetLoraMetricsResponse()
        for slot in self._pool.all_slots:
            response.workers.add(worker_id=slot.worker_id, adapters=slot.snapshot.lora_adapters)
        return response


def _handler(call: Call) -> Callable[[ExecutorApi, Message, Context], Awaitable[Message]]:
    async def handle(api: ExecutorApi, request: Message, context: Context) -> Message:
        return await api.run(call, request, context)

    return handle


for _call in CALLS:
    setattr(ExecutorApi, _call.method, _handler(_call))


def _worker_status(slot: WorkerSlot) -> executor_pb2.WorkerStatus:
    """A worker's line in the status."""
    snapshot = slot.snapshot
    return executor_pb2.WorkerStatus(
        worker_id=slot.worker_id,
        pid=slot.pid,
        epoch=slot.epoch,
        state=slot.state,
        load_progress=slot.load_progress,
        executor=slot.ready.executor if slot.ready is not None else None,
        pool=snapshot.pool,
        counts=snapshot.counts,
        operations_in_flight=snapshot.operations_in_flight,
        memory_bytes=snapshot.memory_bytes,
        device_memory_bytes=snapshot.device_memory_bytes,
        device_memory_peak_bytes=snapshot.device_memory_peak_bytes,
        step_age_ns=snapshot.step_age_ns,
        suspect=slot.suspect,
        trouble=slot.trouble,
    )


def _page_start(page_token: str) -> int:
    """The number after which a page of ListCaches starts."""
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdigit() and len(page_token) <= 20):
        raise InvalidArgument("BAD_PAGE_TOKEN", "page_token", "is not one that ListCaches returned")
    return int(page_token)
