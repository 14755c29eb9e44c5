"""Fields of messages that the protos of this code do not have: those of newer code.

protobuf keeps them and says nothing. Where they would change what is computed, both sides refuse them: the
gateway those of a client, and a worker those of a gateway.
"""

from __future__ import annotations

import functools
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet


def unknown_field(message: Message, path: str = "") -> str:
    """The path of the first unknown field of a message, or of one in it; "": there is none.

    The path ends with the field's number: it has no name here. `path`: of the message, with a dot after it.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return f"{path}{unknown[0].field_number}"
    for name, is_repeated in _parts_of(message.DESCRIPTOR):
        if is_repeated:
            for index, part in enumerate(getattr(message, name)):
                if found := unknown_field(part, f"{path}{name}[{index}]."):
                    return found
        elif message.HasField(name) and (found := unknown_field(getattr(message, name), f"{path}{name}.")):
            return found
    return ""


@functools.cache
def _parts_of(kind: Any) -> tuple[tuple[str, bool], ...]:
    """The fields of a kind of message that are messages: their names, and whether there can be several."""
    return tuple(
        (field.name, field.is_repeated)
        for field in kind.fields
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
    )
