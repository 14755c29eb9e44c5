"""Turns a provider's stream into chunks, for the samples of one request."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from google.rpc import status_pb2
from quire.v1 import runner_pb2

from service.extensions.providers.dialects.base import Delta, StreamUpdate, ToolCallDelta
from service.extensions.providers.failures import malformed
from service.extensions.providers.prices import Prices, tokens_of
from service.runtimes.base import ChunkSink
from service.text.call_values import MAX_CALLS
from service.text.stops import StopMatcher

_DECODER = codecs.getincrementaldecoder("utf-16-le")
# The size of an id for a tool call to which the provider gave none.
_ID_BYTES = 12


class Samples:
    """The samples of one request for one item. Puts their chunks into the sink, each piece of text once."""

    def __init__(
        self, item: runner_pb2.ExecuteItem, indexes: Sequence[int], price: Prices | None, sink: ChunkSink
    ) -> None:
        """`indexes`: the index within the item of each of the request's samples, in order."""
        self._samples = [_Sample(item.item_id, index, item.stop) for index in indexes]
        self._price = price
        self._sink = sink
        # Whether a chunk was put, after which no retry is possible.
        self.has_put = False
        self._has_ended = False
        # The usage that the provider reported last. None: none yet.
        self.usage: runner_pb2.Usage | None = None
        # The output tokens so far, estimated from the text.
        self.estimated_tokens = 0

    def take(self, update: StreamUpdate) -> None:
        """Applies an update of the stream. Raises ProviderFailure for an unknown sample or call."""
        if isinstance(update, runner_pb2.Usage):
            self.usage = update
            return
        if update.sample >= len(self._samples):
            raise malformed()
        self.estimated_tokens += tokens_of(update.text) + tokens_of(update.thoughts)
        self.estimated_tokens += sum(tokens_of(call.arguments_json) for call in update.tool_calls)
        chunk = self._samples[update.sample].take(update)
        if chunk is not None:
            self._put([chunk])

    @property
    def are_finished(self) -> bool:
        """Whether the finish reason of every sample is known."""
        return all(sample.finish for sample in self._samples)

    @property
    def are_stopped(self) -> bool:
        """Whether a stop text has ended every sample, so that the rest of the stream is not needed."""
        return all(sample.is_stopped for sample in self._samples)

    def end(self, error: status_pb2.Status | None = None) -> None:
        """Puts the final chunks. `error` applies to samples without a finish reason.

        Further calls do nothing: a deadline can still pass while the connection is closed.
        """
        if not self._has_ended:
            self._has_ended = True
            self._put([self._counted(sample, sample.end(error)) for sample in self._samples])

    def _counted(self, sample: _Sample, chunk: runner_pb2.SampleChunk) -> runner_pb2.SampleChunk:
        """Adds the usage to a sample's final chunk. The first sample has that of the whole request."""
        if self.usage is not None:
            if sample is not self._samples[0]:
                chunk.usage.SetInParent()
            else:
                chunk.usage.CopyFrom(self.usage)
            if self._price is not None:
                chunk.usage.cost_usd = self._price.cost_usd(chunk.usage)
        return chunk

    def _put(self, chunks: Sequence[runner_pb2.SampleChunk]) -> None:
        self.has_put = True
        self._sink.put(chunks)


class _Sample:
    """One sample of the request."""

    def __init__(self, item_id: str, index: int, stops: Sequence[str]) -> None:
        self._item_id = item_id
        self._index = index
        self._stops = StopMatcher(stops)
        self._num_chunks = 0
        self._text = _DECODER("replace")
        self._thoughts = _DECODER("replace")
        self._num_calls = 0
        # The latest call with each of the provider's indexes.
        self._calls: dict[int, _Call] = {}
        self._stop = ""
        self.finish: runner_pb2.FinishReason | None = None

    @property
    def is_stopped(self) -> bool:
        return bool(self._stops.found)

    def take(self, delta: Delta) -> runner_pb2.SampleChunk | None:
        """The chunk for an update. None: nothing to show yet."""
        if self.finish:
            return None
        text = self._stops.push(_push(self._text, delta.text))
        if self.is_stopped:
            self.finish, self._stop = runner_pb2.FINISH_REASON_STOP, self._stops.found
        elif delta.finish:
            self.finish, self._stop = delta.finish, _whole(delta.stop)
        tool_calls = [call for delta in delta.tool_calls if (call := self._tool_call(delta))]
        thoughts = _push(self._thoughts, delta.thoughts)
        if not text and not thoughts and not delta.logprobs and not tool_calls:
            return None
        chunk = self._chunk()
        chunk.text, chunk.reasoning_content = text, thoughts
        for logprob in delta.logprobs:
            chunk.logprobs.add(logprob=logprob)
        chunk.tool_calls.extend(tool_calls)
        return chunk

    def end(self, error: status_pb2.Status | None) -> runner_pb2.SampleChunk:
        """The final chunk. Earlier chunks stay valid."""
        chunk = self._chunk()
        if not self.is_stopped:
            chunk.text = self._stops.flush()
        if error is None or self.finish:
            chunk.finish_reason = self.finish or runner_pb2.FINISH_REASON_STOP
            chunk.stop = self._stop
        else:
            chunk.finish_reason = runner_pb2.FINISH_REASON_ERROR
            chunk.error.CopyFrom(error)
        return chunk

    def _chunk(self) -> runner_pb2.SampleChunk:
        self._num_chunks += 1
        return runner_pb2.SampleChunk(
            item_id=self._item_id,
            sample=self._index,
            position=self._num_chunks - 1,
        )

    def _tool_call(self, delta: ToolCallDelta) -> runner_pb2.ToolCall | None:
        """The next part of a call: the first part has the id and the name. Raises ProviderFailure."""
        call, begun = self._calls.get(delta.index), dict[str, str]()
        # Some providers repeat id and name, some use one index for several calls, and some have no ids.
        if call is None or (delta.name and delta.id != call.given_id):
            if not delta.name or self._num_calls == MAX_CALLS:
                raise malformed()
            call = self._calls[delta.index] = _Call(self._num_calls, delta.id)
            self._num_calls += 1
            call_id = _whole(delta.id) or f"call_{secrets.token_hex(_ID_BYTES)}"
            begun = {"id": call_id, "name": _whole(delta.name)}
        arguments = _push(call.arguments, delta.arguments_json)
        if not (begun or arguments):
            return None
        return runner_pb2.ToolCall(index=call.index, arguments_json=arguments, **begun)


@dataclass(slots=True)
class _Call:
    """A tool call of a sample. `given_id`: the provider's id. Empty: it has none."""

    index: int
    given_id: str
    arguments: codecs.IncrementalDecoder = field(default_factory=lambda: _DECODER("replace"))


def _push(decoder: codecs.IncrementalDecoder, text: str, *, is_last: bool = False) -> str:
    """The text that is complete so far: JSON may split a surrogate pair between two deltas.

    An unpaired surrogate is replaced, as a protobuf string cannot contain it.
    """
    return decoder.decode(text.encode("utf-16-le", "surrogatepass"), is_last)


def _whole(text: str) -> str:
    return _push(_DECODER("replace"), text, is_last=True)
