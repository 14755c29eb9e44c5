"""Dataclasses that are frozen for the type checker only.

A really frozen dataclass sets each field through `object.__setattr__`. Without that, the state machine took
9 to 10 us for a decode instead of 14 to 15 (on an AMD EPYC with other load).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True)
def frozen_struct(cls: type[_Class]) -> type[_Class]:
    """A dataclass with slots that is compared by its fields and hashable."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
