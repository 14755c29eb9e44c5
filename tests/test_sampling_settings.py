"""What types.proto declares of a sampling setting is what every part offers, checks and computes.

These tests name no setting, so that a new one is tested as soon as it is declared.
"""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from quire import output_options
from quire.cli.options import add_generate
from quire.v1 import runner_pb2, types_pb2
from quire.v1.sampling_settings import SETTINGS, SamplingSettings, Setting

from kernels.cpu.sampling import _Filters
from service.api.request_limits import RequestLimits
from service.api.validation import check_output
from service.errors import InvalidArgument, ProviderFailure
from service.extensions.openai.models import ResolvedModel
from service.extensions.openai.requests import completion
from service.extensions.providers.config import ProviderConfig
from service.extensions.providers.dialects.anthropic import Messages
from service.extensions.providers.dialects.base import refuse
from service.extensions.providers.dialects.openai import Completions
from workers import operations, outputs, wire
from workers.common import worker_pb2
from workers.device_sampling import filters, is_simple
from workers.forward_options import ModelSizes
from workers.sampling import SamplingRow

NAMES = [setting.name for setting in SETTINGS]
each = pytest.mark.parametrize("setting", SETTINGS, ids=NAMES)
LIMITS = RequestLimits(100, 1 << 20)


def other_value(setting: Setting) -> float:
    """One that is allowed, is not neutral, and has the same digits as a float32."""
    values: tuple[float, ...] = (0.5, 1.0, 2.0) if setting.type is float else (1, 2)
    return next(one for one in values if setting.allows(one) and one != setting.neutral)


def given(setting: Setting, value: float) -> types_pb2.SamplingParams:
    fields: Any = {setting.name: setting.type(value)}
    return types_pb2.SamplingParams(**fields)


def test_the_table_is_of_the_fields_that_the_proto_declares() -> None:
    fields = types_pb2.SamplingParams.DESCRIPTOR.fields
    assert {*SamplingSettings.__annotations__} == {field.name for field in fields}
    others = {"logit_bias", "seed", "penalty_from"}  # they have no value that changes nothing
    assert [field.name for field in fields if field.name in NAMES] == NAMES
    assert {field.name for field in fields} == {*NAMES} | others


@each
def test_values_out_of_range_are_refused(setting: Setting) -> None:
    assert setting.allows(setting.neutral) and not setting.allows(float("nan"))
    check_output(types_pb2.OutputOptions(sampling=given(setting, other_value(setting))), LIMITS, 1)
    if setting.type is float:
        for value in (setting.maximum * 1.01, setting.minimum - 0.01, float("nan")):
            with pytest.raises(InvalidArgument) as refused:
                check_output(types_pb2.OutputOptions(sampling=given(setting, value)), LIMITS, 1)
            assert (refused.value.reason, refused.value.field) == (
                "BAD_SAMPLING", f"output.sampling.{setting.name}"
            )  # fmt: skip


@each
def test_http_routes_have_it(setting: Setting) -> None:
    model = ResolvedModel("local", is_local=True, sampling_defaults=types_pb2.SamplingParams())
    body = {"model": "m", "prompt": "x", setting.name: other_value(setting)}
    (item,) = completion(body, lambda _: model).items
    assert getattr(item.sampling, setting.name) == other_value(setting)


@each
def test_a_provider_gets_it_or_it_is_refused(setting: Setting) -> None:
    config = ProviderConfig(
        name="p", dialect="openai-completions", base_url="https://x.example/v1", model="m", extensions=True
    )
    item = runner_pb2.ExecuteItem(item_id="i", text="x", sampling=given(setting, other_value(setting)))
    assert Completions.body(item, 1, config)[setting.name] == other_value(setting)
    field = f"sampling.{setting.name}"
    if field in Messages.unsupported_fields:
        with pytest.raises(ProviderFailure, match=field):
            refuse(item, Messages.unsupported_fields)
    else:
        assert Messages.body(item, 1, config)[setting.name] == other_value(setting)


@each
def test_the_client_and_its_command_have_it(setting: Setting) -> None:
    values: Any = {setting.name: other_value(setting)}
    assert output_options(**values).sampling == given(setting, other_value(setting))
    parser = argparse.ArgumentParser()
    add_generate(parser.add_subparsers())
    flag = f"--{setting.name.replace('_', '-')}"
    parsed = parser.parse_args(["generate", "x", flag, str(other_value(setting))])
    assert getattr(parsed, setting.name) == other_value(setting)
    assert getattr(parser.parse_args(["generate", "x"]), setting.name) is None


def test_what_leaves_tokens_out_is_known_by_the_compiled_kernels_and_in_the_order_of_the_proto() -> None:
    """One that they lack would be 0 there, without an error."""
    assert [field[0] for field in _Filters._fields_] == [*outputs.FILTERS]
    assert [name for name in NAMES if name in outputs.FILTERS] == [*outputs.FILTERS]


@each
def test_a_worker_computes_with_it(setting: Setting) -> None:
    output = types_pb2.OutputOptions(sampling=given(setting, other_value(setting)))
    options = worker_pb2.ForwardOptions(rows=1, output=output).SerializeToString()
    forward = worker_pb2.ForwardCommand(
        sequence=1, token_ids=[1], options=options, kind="OPERATION_KIND_DECODE"
    )
    command = wire.to_command(worker_pb2.WorkerCommand(op_id=1, forward=forward), ModelSizes(100))
    assert isinstance(command, operations.Forward)
    spec = command.output.sampling
    assert spec is not None and getattr(spec, setting.name) == other_value(setting)
    assert getattr(outputs.Sampling(), setting.name) == setting.neutral
    if setting.name in outputs.FILTERS:
        drawn: Any = {"temperature": 1.0, setting.name: other_value(setting)}
        filtered = outputs.Sampling(**drawn)
        (column,) = filters([filtered])[setting.name].tolist()
        assert column == other_value(setting) and not is_simple(SamplingRow(filtered))
