"""What is known of each choice of a response: its parts, as they come or all together, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.v1 import runner_pb2

from service.text.output_parser import Part

_FINISH = {
    runner_pb2.FINISH_REASON_STOP: "stop",
    runner_pb2.FINISH_REASON_LENGTH: "length",
    runner_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
    runner_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    runner_pb2.FINISH_REASON_CANCELLED: "stop",
}


@dataclass(slots=True)
class Call:
    """A tool call, whose arguments are in pieces."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Choice:
    """One sample's part of the response."""

    def __init__(self, index: int, begin: int = 0) -> None:
        """`begin`: the characters before the sample."""
        self.index = index
        self.begin = begin
        self.num_tokens = 0
        self.finish: str | None = None
        # The stop text that has ended it.
        self.stop = ""
        self._open_calls: set[int] = set()
        # Of a stream: the characters that were sent, tokens whose log-probabilities were not, experts, which
        # all come last, and whether something was sent.
        self.num_characters = begin
        self.waiting: list[dict[str, Any]] = []
        self.experts: list[bytes] = []
        self.has_begun = False
        # Of a response in one piece: serialized chunks, and the parts of a chat.
        self.chunks_data: list[bytes] = []
        self.content: list[str] = []
        self.thoughts: list[str] = []
        self.calls: dict[int, Call] = {}

    def parts(self, chunk: runner_pb2.SampleChunk) -> list[Part]:
        """The parts of a chunk, in their order. With the last one, also sets the reason of the end."""
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

    def keep(self, parts: list[Part]) -> None:
        """Keeps the parts of a chat for a response in one piece, where malformed calls are content."""
        for part in parts:
            if part.thoughts:
                self.thoughts.append(part.thoughts)
            elif part.begun:
                self.calls[part.index] = Call(*part.begun)
            elif part.arguments:
                self.calls[part.index].arguments.append(part.arguments)
            else:
                if part.broken:
                    del self.calls[part.index]
                self.content.append(part.content + part.broken)

    def chunks(self) -> Iterator[runner_pb2.SampleChunk]:
        """Those that were stored."""
        return map(runner_pb2.SampleChunk.FromString, self.chunks_data)
