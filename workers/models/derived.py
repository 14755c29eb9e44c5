"""What is computed of parameters once, and again when these change in place, as on a GPU."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import torch


def renew(owner: object) -> None:
    """Compute an object's cached properties again, those that were read, in the memory where they are.

    Mutates their tensors: CUDA graphs read them there.
    """
    for name, held in vars(owner).items():
        attribute = getattr(type(owner), name, None)
        if isinstance(attribute, cached_property):
            _copy(attribute.func(owner), held)


def _copy(new: object, held: object) -> None:
    """Copy tensors, alone, listed or in the fields of a dataclass. What else there is does not change."""
    if isinstance(held, torch.Tensor) and isinstance(new, torch.Tensor):
        held.copy_(new)
    elif isinstance(held, list | tuple) and isinstance(new, list | tuple):
        for part, into in zip(new, held, strict=True):
            _copy(part, into)
    elif dataclasses.is_dataclass(held):
        for field in dataclasses.fields(held):
            _copy(getattr(new, field.name), getattr(held, field.name))
