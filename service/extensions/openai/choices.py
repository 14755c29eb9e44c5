"""The state of each choice of a response: its parts, streamed or collected, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from quire.v1 import runner_pb2

from service.text import bounded_json
from service.text.output_parser import Part

_FINISH = {
    runner_pb2.FINISH_REASON_STOP: "stop",
    runner_pb2.FINISH_REASON_LENGTH: "length",
    runner_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
    runner_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    runner_pb2.FINISH_REASON_CANCELLED: "stop",
}
THOUGHTS, TEXT, CALL = "thoughts", "text", "call"


@dataclass(eq=False, slots=True)
class Block:
    """A run of thoughts or of text, or a tool call. Its text or arguments are in pieces.

    Attributes:
        is_cut: Whether the answer's end has cut it off, or it is a call that turned out to be malformed.
    """

    kind: str
    index: int
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    is_cut: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The arguments of a call. None: they are incomplete or not an object."""
        try:
            arguments = bounded_json.loads(self.text)
        except ValueError:
            return None
        return arguments if isinstance(arguments, dict) else None


# ("begin", "end" or "delta"; the block; the text that a delta adds)
Event: TypeAlias = tuple[str, Block, str]


class Blocks:
    """The blocks of an answer, one open at a time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False
        # By the call's number in the answer. Providers may interleave the arguments of several calls.
        self._calls: dict[int, Block] = {}

    def add(self, parts: list[Part]) -> list[Event]:
        """Adds parts of a stream. Returns the resulting events."""
        events: list[Event] = []
        for part in parts:
            if part.begun:
                events += self._begin(CALL, *part.begun)
                self._calls[part.index] = self.all[-1]
            elif part.content or part.thoughts:
                kind = TEXT if part.content else THOUGHTS
                if not (self._is_open and self.all[-1].kind == kind):
                    events += self._begin(kind)
            elif part.broken:
                self._calls[part.index].is_cut = True
            if text := part.content or part.thoughts or part.arguments:
                block = self._calls[part.index] if part.arguments else self.all[-1]
                block.texts.append(text)
                events.append(("delta", block, text))
        return events

    def keep(self, parts: list[Part]) -> None:
        """Adds parts of a response in one piece: a malformed call becomes text in its place."""
        for part in parts:
            if part.broken:
                block = self._calls[part.index]
                block.kind, block.texts = TEXT, [part.broken]
            else:
                self.add([part])

    def end(self, *, is_cut: bool = False) -> list[Event]:
        """Ends the open block, if any. `is_cut`: the answer was cut off, maybe after the end of a call."""
        if not self._is_open:
            return []
        self._is_open = False
        last = self.all[-1]
        last.is_cut |= is_cut and not (last.kind == CALL and last.arguments is not None)
        return [("end", last, "")]

    def of_body(self) -> list[Block]:
        """Numbered copies of the blocks. Adjacent texts, which malformed calls leave, become one block."""
        found: list[Block] = []
        for block in self.all:
            if found and block.kind == found[-1].kind == TEXT:
                found[-1].texts += block.texts
                found[-1].is_cut |= block.is_cut
            else:
                found.append(replace(block, index=len(found), texts=[*block.texts]))
        return found

    def texts(self, kind: str) -> list[str]:
        """The pieces of all blocks of a kind."""
        return [text for block in self.all if block.kind == kind for text in block.texts]

    def _begin(self, kind: str, call_id: str = "", name: str = "") -> list[Event]:
        ended = self.end()
        self._is_open = True
        self.all.append(Block(kind, len(self.all), call_id, name))
        return [*ended, ("begin", self.all[-1], "")]


class Choice:
    """One sample of the response."""

    def __init__(self, index: int, begin: int = 0) -> None:
        """`begin`: the number of characters before the sample."""
        self.index = index
        self.begin = begin
        self.num_tokens = 0
        self.finish: str | None = None
        # The stop text that ended it.
        self.stop = ""
        self._open_calls: set[int] = set()
        # For a stream: the number of characters sent, the tokens whose log-probabilities were not sent yet,
        # the experts, which are all sent last, and whether anything was sent.
        self.num_characters = begin
        self.waiting: list[dict[str, Any]] = []
        self.experts: list[bytes] = []
        self.has_begun = False
        # For a response in one piece: serialized chunks.
        self.chunks_data: list[bytes] = []
        # For a chat in one piece, and for APIs with blocks.
        self.blocks = Blocks()

    def parts(self, chunk: runner_pb2.SampleChunk) -> list[Part]:
        """The parts of a chunk in order. Sets the finish reason if this is the last chunk."""
        self.num_tokens += len(chunk.token_ids)
        open_calls, new_calls = list[Part](), list[Part]()
        for call in chunk.tool_calls:
            of_call = open_calls if call.index in self._open_calls else new_calls
            if call.id or call.name:
                of_call.append(Part(begun=(call.id, call.name), index=call.index))
            if call.arguments_json:
                of_call.append(Part(arguments=call.arguments_json, index=call.index))
        for index, text in chunk.malformed_calls.items():
            (open_calls if index in self._open_calls else new_calls).append(Part(broken=text, index=index))
        self._open_calls.update(call.index for call in chunk.tool_calls)
        self._open_calls.difference_update(chunk.malformed_calls)
        self.finish, self.stop = _FINISH.get(chunk.finish_reason), chunk.stop
        if self.finish == "stop" and self._open_calls:
            self.finish = "tool_calls"
        thoughts = [Part(thoughts=chunk.reasoning_content)] if chunk.reasoning_content else []
        content = [Part(content=chunk.text)] if chunk.text else []
        return [*thoughts, *open_calls, *content, *new_calls]

    def chunks(self) -> Iterator[runner_pb2.SampleChunk]:
        """The stored chunks."""
        return map(runner_pb2.SampleChunk.FromString, self.chunks_data)
