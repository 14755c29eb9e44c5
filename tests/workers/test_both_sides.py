"""Messages and the dataclasses that they become have the same fields, in both directions."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from quire.v1 import types_pb2
from quire.v1.sampling_settings import SETTINGS

from workers.common import worker_pb2
from workers.models.chat_template import ChatTemplate
from workers.models.model import ModelDescription
from workers.operations import FailureReason, Kind, Priority
from workers.outputs import DataType, OutputSpec, Sampling

# What an output has of ForwardOptions.
OF_OPTIONS = ("end_token_ids",)
# What workers know of their model, and tell in other words (`ExecutorCapabilities.products`).
OF_WORKERS = ("rounds_rows",)


def fields_of(record: Any) -> set[str]:
    """Those that are given to it. Some classes have slots instead of fields."""
    if not dataclasses.is_dataclass(record):
        return set(record.__slots__)
    return {field.name for field in dataclasses.fields(record) if field.init}


@pytest.mark.parametrize(
    ("record", "message", "more"),
    [
        # What callers ask for.
        (Sampling, types_pb2.SamplingParams, ()),
        (OutputSpec, types_pb2.OutputOptions, ()),
        # What workers say.
        # It comes with the texts.
        (ModelDescription, types_pb2.ModelDescription, ("pooling",)),
        (ChatTemplate, types_pb2.ChatTemplate, ()),
    ],
)
def test_both_sides_have_the_same_fields(record: Any, message: Any, more: tuple[str, ...]) -> None:
    own = fields_of(record) - {*OF_OPTIONS, *OF_WORKERS}
    assert own | set(more) == set(message.DESCRIPTOR.fields_by_name)


def test_what_a_worker_does_without_a_setting_is_what_its_neutral_value_does() -> None:
    nothing = Sampling()
    assert {one.name: getattr(nothing, one.name) for one in SETTINGS} == {
        one.name: one.neutral for one in SETTINGS
    }


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Kind, worker_pb2.OperationKind),
        (Priority, types_pb2.Priority),
        (DataType, types_pb2.DataType),
        (FailureReason, worker_pb2.WorkerErrorReason),
    ],
)
def test_both_sides_have_the_same_values(ours: type[enum.Enum], theirs: EnumTypeWrapper) -> None:
    prefix = theirs.keys()[0].removesuffix("UNSPECIFIED")
    named = {name.removeprefix(prefix) for name in theirs.keys()}  # noqa: SIM118 - no mapping
    assert named - {"UNSPECIFIED", "NONE"} == {one.name for one in ours}
