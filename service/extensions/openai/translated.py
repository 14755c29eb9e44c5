"""What the translations of other APIs share: requests become those of chats, and answers are blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.v1 import runner_pb2

from service.errors import InvalidArgument
from service.extensions.openai.choices import Choice
from service.extensions.openai.item_fields import renamed
from service.extensions.openai.requests import CompletionRequest, ResolveModel, chat
from service.extensions.openai.responses import CompletionResponse, to_json
from service.text.output_parser import Part

_Request = TypeVar("_Request", bound=CompletionRequest)
THOUGHTS, TEXT, CALL = "thoughts", "text", "call"
# The reasons of an end after which an answer is not whole.
_CUT = frozenset({"length", "content_filter"})


def as_chat(
    kind: type[_Request], body: dict[str, Any], resolve: ResolveModel, names: Mapping[str, str], **more: Any
) -> _Request:
    """The request of a chat as one of another API. `names`: the paths of what it calls otherwise.

    Raises InvalidArgument, and what `resolve` raises.
    """
    try:
        request = chat({name: value for name, value in body.items() if value is not None}, resolve)
    except InvalidArgument as error:
        raise error.at(renamed(error.field, names)) from None
    given = {each.name: getattr(request, each.name) for each in dataclasses.fields(request)}
    # Prompts are counted when a stream begins.
    given |= {"with_usage": request.is_stream, "usage_in_all": request.is_stream}
    return kind(**given | {"names": names} | more)


@dataclass(slots=True)
class Block:
    """A stretch of thoughts or text, or a call; its text or arguments are in pieces.

    Attributes:
        is_cut: Whether the answer's end has cut it off, or it is a call that has turned out to be malformed.
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


class Blocks:
    """The blocks of a stream, one open at a time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False
        # By their numbers in the answer. Providers may send arguments of several in turns.
        self._calls: dict[int, Block] = {}

    def add(self, parts: list[Part]) -> Iterator[tuple[str, Block, str]]:
        """What happens to which block: it begins, ends, or gets a text (delta)."""
        for part in parts:
            if part.begun:
                yield from self._begin(CALL, *part.begun)
                self._calls[part.index] = self.all[-1]
            elif part.content or part.thoughts:
                kind = TEXT if part.content else THOUGHTS
                if not (self._is_open and self.all[-1].kind == kind):
                    yield from self._begin(kind)
            elif part.broken:
                self._calls[part.index].is_cut = True
            if text := part.content or part.thoughts or part.arguments:
                block = self._calls[part.index] if part.arguments else self.all[-1]
                block.texts.append(text)
                yield "delta", block, text

    def end(self, *, is_cut: bool = False) -> Iterator[tuple[str, Block, str]]:
        """Ends the open block."""
        if self._is_open:
            self._is_open = False
            self.all[-1].is_cut |= is_cut
            yield "end", self.all[-1], ""

    def _begin(self, kind: str, call_id: str = "", name: str = "") -> Iterator[tuple[str, Block, str]]:
        yield from self.end()
        self._is_open = True
        self.all.append(Block(kind, len(self.all), call_id, name))
        yield "begin", self.all[-1], ""


def named_event(value: Any) -> str:
    """A server-sent event with its type as its name."""
    return f"event: {value['type']}\ndata: {to_json(value)}\n\n"


class BlocksResponse(CompletionResponse):
    """A response of one choice. A stream has events of its blocks, between some at its begin and its end."""

    frame = staticmethod(named_event)
    last_frame = ""

    def events(self, chunk: runner_pb2.SampleChunk) -> Iterator[dict[str, Any]]:
        choice, parts = self._update_choice(chunk)
        if not self._has_begun:
            self._has_begun = True
            self._blocks = Blocks()
            yield from self._begin_events()
        for event in self._blocks.add(parts):
            yield from self._block_events(*event)
        if choice.finish:
            for event in self._blocks.end(is_cut=choice.finish in _CUT):
                yield from self._block_events(*event)
            yield from self._end_events(choice)

    def last_events(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def _begin_events(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _block_events(self, what: str, block: Block, text: str) -> Iterator[dict[str, Any]]:
        """Those of what `Blocks.add` says."""
        raise NotImplementedError

    def _end_events(self, choice: Choice) -> Iterator[dict[str, Any]]:
        raise NotImplementedError


def blocks_of(choice: Choice) -> list[Block]:
    """The blocks of a response in one piece."""
    blocks = [Block(THOUGHTS, 0, texts=choice.thoughts)] if choice.thoughts else []
    if any(choice.content):
        blocks.append(Block(TEXT, 0, texts=choice.content))
    for block in blocks[-1:]:
        # What was cut off of a call is text.
        block.is_cut = choice.finish in _CUT
    blocks += [Block(CALL, 0, call.id, call.name, call.arguments) for call in choice.calls.values()]
    for index, block in enumerate(blocks):
        block.index = index
    return blocks
