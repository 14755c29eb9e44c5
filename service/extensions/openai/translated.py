"""Shared by the other text APIs: requests are translated to chats, and answers consist of blocks."""

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
# The finish reasons of incomplete answers.
CUT = frozenset({"length", "content_filter"})


def as_chat(
    kind: type[_Request], body: dict[str, Any], resolve: ResolveModel, names: Mapping[str, str], **more: Any
) -> _Request:
    """Parses the body of a chat as a request of type `kind`. `names`: the paths in the original request.

    Raises InvalidArgument, and whatever `resolve` raises.
    """
    try:
        request = chat({name: value for name, value in body.items() if value is not None}, resolve)
    except InvalidArgument as error:
        raise error.at(renamed(error.field, names)) from None
    given = {each.name: getattr(request, each.name) for each in dataclasses.fields(request)}
    # These APIs report the prompt tokens at the beginning of a stream.
    given |= {"with_usage": request.is_stream, "usage_in_all": request.is_stream}
    return kind(**given | {"names": names} | more)


def named_event(value: Any) -> str:
    """Encodes a server-sent event with its type as its name."""
    return f"event: {value['type']}\ndata: {to_json(value)}\n\n"


class BlocksResponse(CompletionResponse):
    """A response of one choice. A stream has events for its beginning, its blocks and its end."""

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
        """The events for one event of `Blocks.add`."""
        raise NotImplementedError

    def _end_events(self, choice: Choice) -> Iterator[dict[str, Any]]:
        raise NotImplementedError
