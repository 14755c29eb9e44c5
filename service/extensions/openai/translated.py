"""What the translations of other APIs share: requests become those of chats, and answers are blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from quire.v1 import runner_pb2

from service.errors import InvalidArgument
from service.extensions.openai.choices import Block, Choice
from service.extensions.openai.item_fields import renamed
from service.extensions.openai.requests import CompletionRequest, ResolveModel, chat
from service.extensions.openai.responses import CompletionResponse, to_json

_Request = TypeVar("_Request", bound=CompletionRequest)
# The reasons of an end after which an answer is not whole.
CUT = frozenset({"length", "content_filter"})


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
            yield from self._begin_events()
        for event in choice.blocks.add(parts):
            yield from self._block_events(*event)
        if choice.finish:
            for event in choice.blocks.end(is_cut=choice.finish in CUT):
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
