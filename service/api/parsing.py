"""Requests that cannot be parsed, as values: grpc itself would answer INTERNAL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf import message as protobuf_message


class Malformed:
    """Stands for a message that could not be parsed."""


def tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Lets the handler answer what cannot be parsed: it is given a Malformed instead."""

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except protobuf_message.DecodeError:
            return Malformed()

    return parse
