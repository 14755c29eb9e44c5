"""Values of flags, refused in words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")


def option_type(
    convert: Callable[[str], _Value], allowed: str, accepts: Callable[[_Value], bool] = lambda _: True
) -> Callable[[str], _Value]:
    """A type for argparse, which says in words what can be given."""

    def parse(text: str) -> _Value:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} is refused: must be {allowed}")
        return value

    return parse
