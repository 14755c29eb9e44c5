"""Items that a runtime could not begin go to the next one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from google.rpc import code_pb2, error_details_pb2, status_pb2
from quire.v1 import runner_pb2

from service.api.status import to_status
from service.errors import QuireError
from service.runtimes.base import Batch
from service.runtimes.execution import Execution, SampleKey
from service.runtimes.items import failures

if TYPE_CHECKING:
    from service.runtimes.router import Choice

# No room, or out of order: that may be better elsewhere.
_ELSEWHERE_CODES = {code_pb2.RESOURCE_EXHAUSTED, code_pb2.UNAVAILABLE}
# What one runtime can do and another cannot.
_ELSEWHERE_REASONS = {
    "UNSUPPORTED",
    "UNSUPPORTED_BY_EXECUTOR",
    "NO_TOKENIZER",
    "NO_CHAT_TEMPLATE",
    "UNAUTHORIZED",
    "FORBIDDEN",
    "TOKEN_OUT_OF_VOCAB",
    "SEQUENCE_TOO_LONG",
    "CONTEXT_LENGTH_EXCEEDED",
}


# Of the runtimes that a failure names beside its own, in characters.
_MAX_SAID = 512


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A runtime has not begun a sample."""

    runtime: str
    error: status_pb2.Status


class SecondChoice:
    """Runs a batch on one runtime after another (an Outlet, between them and the execution)."""

    def __init__(self, choices: Sequence[Choice], execution: Execution) -> None:
        self._choices = choices
        self._execution = execution
        # Of items of which nothing has come from the runtime that is asked: how their samples ended.
        self._failed: dict[str, list[runner_pb2.SampleChunk]] = defaultdict(list)
        # Who has not begun a sample, and why.
        self._refusals: dict[SampleKey, list[_Refusal]] = defaultdict(list)
        self._begun: set[str] = set()
        self._is_last = False
        self._runtime = ""

    async def execute(self, batch: Batch) -> None:
        """See `Runtime.execute`."""
        items = list(batch.items)
        for index, choice in enumerate(self._choices):
            self._is_last = index == len(self._choices) - 1
            self._runtime = choice.runtime.name
            self._execution.runs_on(choice.runtime.describe(), choice.reason)
            self._failed.clear()
            try:
                await choice.runtime.execute(replace(batch, items=items), self)
            except QuireError as error:
                if self._begun.intersection(item.item_id for item in items):
                    raise
                if not _may_be_better_elsewhere(to_status(error)):
                    raise
                for item in items:
                    self._failed.pop(item.item_id, None)
                    self.put(failures(item, error.untraced()))
            items = [item for item in items if item.item_id in self._given_up()]
            if not items:
                return

    def _given_up(self) -> set[str]:
        """The items of which nothing has come."""
        return self._failed.keys() - self._begun

    # An Outlet.

    def put(self, chunks: Sequence[runner_pb2.SampleChunk]) -> None:
        """See `Outlet`."""
        passed: list[runner_pb2.SampleChunk] = []
        for chunk in chunks:
            if self._runtime != self._execution.started.runtime:
                chunk.runtime = self._runtime
            if self._is_refusal(chunk):
                refusals = self._refusals[chunk.item_id, chunk.sample]
                refusals.append(_Refusal(self._runtime, chunk.error))
                if not self._is_last:
                    self._failed[chunk.item_id].append(chunk)
                    continue
                self._tell_first(chunk, refusals)
            if chunk.item_id not in self._begun:
                self._begun.add(chunk.item_id)
                passed += self._failed.pop(chunk.item_id, ())
            passed.append(chunk)
        if passed:
            self._execution.put(passed)

    def _is_refusal(self, chunk: runner_pb2.SampleChunk) -> bool:
        """Whether this is all that came of its sample, and another runtime may do better."""
        return (
            (self._is_last or chunk.item_id not in self._begun)
            and chunk.finish_reason == runner_pb2.FINISH_REASON_ERROR
            and not (chunk.position or chunk.text)
            and _may_be_better_elsewhere(chunk.error)
        )

    def _tell_first(self, chunk: runner_pb2.SampleChunk, refusals: Sequence[_Refusal]) -> None:
        """All have refused a sample: why the first did is told, and of the others in short."""
        first, *others = refusals
        if not others:
            return
        chunk.error.CopyFrom(_with_others(first.error, others))
        chunk.runtime = "" if first.runtime == self._execution.started.runtime else first.runtime

    @property
    def is_full(self) -> bool:
        """See `Outlet`."""
        return self._execution.is_full

    async def room(self) -> None:
        """See `Outlet`."""
        await self._execution.room()

    def on_release(self, let_go: Callable[[], None]) -> None:
        """See `Outlet`."""
        self._execution.on_release(let_go)


def _may_be_better_elsewhere(status: status_pb2.Status) -> bool:
    reason = _reason(status)
    # A tenant's quota is the same for all runtimes.
    if reason == "QUOTA":
        return False
    return status.code in _ELSEWHERE_CODES or reason in _ELSEWHERE_REASONS


def _reason(status: status_pb2.Status) -> str:
    info = error_details_pb2.ErrorInfo()
    return next((info.reason for detail in status.details if detail.Unpack(info)), "")


def _with_others(status: status_pb2.Status, others: Sequence[_Refusal]) -> status_pb2.Status:
    """A failure whose metadata names what others said."""
    told = status_pb2.Status()
    told.CopyFrom(status)
    info = error_details_pb2.ErrorInfo()
    for detail in told.details:
        if detail.Unpack(info):
            said = ", ".join(f"{other.runtime}: {_reason(other.error)}" for other in others)
            info.metadata["elsewhere"] = said[:_MAX_SAID]
            detail.Pack(info)
            break
    return told
