"""What comes of the samples of one request, as chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from google.rpc import status_pb2
from quire.v1 import runner_pb2

from service.runtimes.base import Outlet
from service.runtimes.remote.dialects.base import Delta, Said, ToolPiece
from service.runtimes.remote.failures import malformed
from service.runtimes.remote.prices import Prices, tokens_of
from service.text.stops import StopTexts

_UNFINISHED = runner_pb2.FINISH_REASON_UNSPECIFIED


class Samples:
    """The samples of one request for one item. Says each text once."""

    def __init__(
        self, item: runner_pb2.ExecuteItem, indexes: Sequence[int], price: Prices | None, outlet: Outlet
    ) -> None:
        """`indexes`: which of the item's samples the request's are, in their order."""
        stops = StopTexts(item.stop)
        self._samples = [_Sample(item.item_id, index, stops) for index in indexes]
        self._price = price
        self._outlet = outlet
        # Whether anything was said, so that it cannot be begun anew.
        self.has_put = False
        self._has_ended = False
        # What the provider says it has used. None: nothing yet.
        self.usage: runner_pb2.Usage | None = None
        # What is known without it.
        self.seen_tokens = 0

    def take(self, said: Said) -> None:
        """More has come. Raises ProviderFailure: it is of a sample that was not asked for."""
        if isinstance(said, runner_pb2.Usage):
            self.usage = said
            return
        if said.sample >= len(self._samples):
            raise malformed()
        self.seen_tokens += tokens_of(said.text)
        self.seen_tokens += sum(tokens_of(call.arguments_json) for call in said.tool_calls)
        chunk = self._samples[said.sample].take(said)
        if chunk is not None:
            self._put([chunk])

    @property
    def are_finished(self) -> bool:
        """Whether it is known of all why they ended."""
        return all(sample.finish for sample in self._samples)

    @property
    def are_cut(self) -> bool:
        """Whether nothing more is wanted of any, whatever the provider would say."""
        return all(sample.is_cut for sample in self._samples)

    def end(self) -> None:
        """The answer is complete."""
        self._put([self._counted(sample, sample.end()) for sample in self._samples])
        self._has_ended = True

    def fail(self, error: status_pb2.Status) -> None:
        """Nothing more comes. Samples of which it is known why they ended have ended well.

        What is complete stays so: a deadline can pass while the connection is left.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self._put(
            [
                self._counted(sample, sample.end() if sample.finish else sample.fail(error))
                for sample in self._samples
            ]
        )

    def _counted(self, sample: _Sample, chunk: runner_pb2.SampleChunk) -> runner_pb2.SampleChunk:
        """The last chunk of a sample. What all of a request have used is told with the first of them."""
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
        self._outlet.put(chunks)


class _Sample:
    """One of them."""

    def __init__(self, item_id: str, index: int, stops: StopTexts) -> None:
        self._item_id = item_id
        self._index = index
        self._stops = stops.watch()
        self._chunks = 0
        self._text = _Pieces()
        # By the index of the call.
        self._arguments: defaultdict[int, _Pieces] = defaultdict(_Pieces)
        self._stop = ""
        self.finish: runner_pb2.FinishReason = _UNFINISHED

    @property
    def is_cut(self) -> bool:
        """A stop text was found here, whatever else comes."""
        return bool(self._stops.found)

    def take(self, delta: Delta) -> runner_pb2.SampleChunk | None:
        """What can be shown of it."""
        if self.finish:
            return None
        text = self._stops.push(self._text.push(delta.text))
        if self.is_cut:
            self.finish, self._stop = runner_pb2.FINISH_REASON_STOP, self._stops.found
        elif delta.finish:
            self.finish, self._stop = delta.finish, _whole(delta.stop)
        tool_calls = [call for piece in delta.tool_calls if (call := self._tool_call(piece))]
        if not text and not delta.logprobs and not tool_calls:
            return None
        chunk = self._chunk()
        chunk.text = text
        for logprob in delta.logprobs:
            chunk.logprobs.add(logprob=logprob)
        chunk.tool_calls.extend(tool_calls)
        return chunk

    def end(self) -> runner_pb2.SampleChunk:
        """Its last chunk."""
        chunk = self._chunk()
        if not self.is_cut:
            chunk.text = self._stops.flush()
        chunk.finish_reason = self.finish or runner_pb2.FINISH_REASON_STOP
        chunk.stop = self._stop
        return chunk

    def fail(self, error: status_pb2.Status) -> runner_pb2.SampleChunk:
        """Its last chunk. What came before stands."""
        chunk = self._chunk()
        chunk.text = self._stops.flush()
        chunk.finish_reason = runner_pb2.FINISH_REASON_ERROR
        chunk.error.CopyFrom(error)
        return chunk

    def _chunk(self) -> runner_pb2.SampleChunk:
        self._chunks += 1
        return runner_pb2.SampleChunk(
            item_id=self._item_id, sample=self._index, position=self._chunks - 1, finish_reason=_UNFINISHED
        )

    def _tool_call(self, piece: ToolPiece) -> runner_pb2.ToolCall | None:
        arguments = self._arguments[piece.index].push(piece.arguments_json)
        if not (piece.id or piece.name or arguments):
            return None
        return runner_pb2.ToolCall(
            index=piece.index, id=_whole(piece.id), name=_whole(piece.name), arguments_json=arguments
        )


class _Pieces:
    """A text in pieces becomes whole characters: JSON may bring the two halves of one in two pieces."""

    def __init__(self) -> None:
        self._half = ""

    def push(self, text: str) -> str:
        """What is whole now."""
        text = self._half + text
        self._half = ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return _whole(text)


def _whole(text: str) -> str:
    """Halves that belong together are joined; others are replaced, since no message can hold them."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
