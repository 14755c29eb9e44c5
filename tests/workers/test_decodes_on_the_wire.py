"""Plain decodes and their results on the wire: the same as a message for each of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from quire.v1 import types_pb2

from service.caches import answers, effects
from service.caches.requests import Append, AppendKind, Priority
from service.pool import wire as gateway_wire
from tests.commands import Command
from tests.forwards import SentForward, command_of
from workers import wire as worker_wire
from workers.common import worker_pb2
from workers.decodes import Column, Decodes
from workers.forward_options import ModelSizes
from workers.operations import Forward, Kind
from workers.outputs import GREEDY, OutputSpec, RowOutput

VOCABULARY, LAYERS = 1000, 4
SIZES = ModelSizes(VOCABULARY, LAYERS)
Output = types_pb2.OutputOptions
Draw = types_pb2.SamplingParams
OUTPUTS = (
    Output(),
    Output(top_logprobs=3, sampled_logprob=True),
    Output(sampling=Draw(temperature=0.5)),
    Output(sampling=Draw(temperature=0.5, seed=7)),
    Output(sampling=Draw(temperature=0.5, repetition_penalty=1.5)),
    Output(mask=types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=[1, 2]))),
    Output(logits=types_pb2.DATA_TYPE_F32),
    Output(logprob_token_ids=range(300)),
)


class Link:
    """What is sent to a worker."""

    def __init__(self) -> None:
        self.request = worker_pb2.ConnectRequest()

    def send(self, request: worker_pb2.ConnectRequest) -> None:
        self.request = request


def attempt(dice: random.Random, op_id: int) -> effects.Command:
    options = worker_pb2.ForwardOptions(rows=dice.choice([1, 1, 1, 1, 0]), output=dice.choice(OUTPUTS))
    append = Append(
        cache_id="c",
        kind=AppendKind.DECODE if dice.random() < 0.9 else AppendKind.VERIFY,
        token_ids=[dice.randrange(VOCABULARY) for _ in range(1 if dice.random() < 0.9 else 2)],
        options=options.SerializeToString(),
        priority=dice.choice([Priority.NORMAL] * 9 + [Priority.HIGH]),
        prelaunch=dice.choice([0, 0, 1, 16]),
    )
    asked = SentForward(
        op_id=op_id,
        number=op_id + 100,
        position=dice.choice([0, 1, 77, 1 << 20]),
        append=append,
        seed=dice.getrandbits(64),
        prompt_len=dice.randrange(50),
        caller=dice.randrange(4),
        is_copy=dice.random() < 0.1,
        salt=b"salt",
        adapter=dice.choice([0] * 9 + [3]),
        timeout_s=dice.choice([0.5, 1e9]),
    )
    return command_of(asked)


def sent(commands: list[effects.Command]) -> list[worker_pb2.WorkerCommand]:
    link: Any = Link()
    gateway_wire.send({("w", 1): link}, [("w", 1, command) for command in commands])
    return list(link.request.commands)


def taken(messages: list[worker_pb2.WorkerCommand]) -> list[Command]:
    """What a worker makes of them, plain decodes as forwards."""
    found: list[Command] = []
    for message in messages:
        if message.WhichOneof("command") == "decodes":
            decodes, others = worker_wire.to_decodes(message.decodes, SIZES)
            for forward in decodes.forwards():
                assert forward.is_plain
                found.append(forward)
            found += [worker_wire.to_command(other, SIZES) for other in others]
        else:
            found.append(worker_wire.to_command(message, SIZES))
    return found


def described(command: Command) -> Any:
    """Without times, which depend on when it was decoded."""
    if not isinstance(command, Forward):
        return command
    timeout = None if command.deadline_ns is None else round((command.deadline_ns - command.arrived_ns) / 1e6)
    names = (
        "op_id", "sequence", "position", "rows", "output", "accept", "kind", "caller", "prompt_len",
        "ephemeral", "adapter", "priority", "prelaunch", "scored", "parents",
    )  # fmt: skip
    return list(command.token_ids), timeout, [getattr(command, name) for name in names]


@pytest.mark.parametrize("seed", range(6))
def test_commands_are_those_that_are_sent_one_by_one(seed: int) -> None:
    dice = random.Random(seed)
    commands: list[effects.Command] = []
    for op_id in range(1, 60):
        cut = effects.TruncateSequence(op_id, op_id, 3)
        commands.append(cut if dice.random() < 0.1 else attempt(dice, op_id))
    expected = []
    for command in commands:
        message = worker_pb2.WorkerCommand()
        gateway_wire.write_command(command, message)
        expected.append(worker_wire.to_command(message, SIZES))
    messages = sent(commands)
    assert len(messages) < len(commands), "decodes that follow each other are one command"
    found = taken(messages)
    by_id = {command.op_id: described(command) for command in found}
    assert len(by_id) == len(found)
    assert by_id == {command.op_id: described(command) for command in expected}
    cuts = [command.op_id for command in commands if isinstance(command, effects.TruncateSequence)]
    for cut_id in cuts:
        # What was sent before a cut is before it.
        op_ids = [command.op_id for command in found]
        assert set(op_ids[: op_ids.index(cut_id)]) == set(range(1, cut_id))


def test_equal_options_are_sent_and_decoded_once() -> None:
    options = worker_pb2.ForwardOptions(rows=1, output=Output(top_logprobs=2)).SerializeToString()
    append = Append(cache_id="c", kind=AppendKind.DECODE, token_ids=[5], options=options)
    commands: list[effects.Command] = [
        command_of(SentForward(op_id, op_id, 9, append, 1, 0, 1, timeout_s=1e9)) for op_id in range(1, 40)
    ]
    (message,) = sent(commands)
    assert list(message.decodes.options) == [options]
    decodes, others = worker_wire.to_decodes(message.decodes, SIZES)
    assert not others and len(decodes.distinct_outputs) == 1
    arrived_ns = decodes.columns[Column.ARRIVED_NS]
    assert (arrived_ns > 0).all() and (decodes.columns[Column.DEADLINE] > arrived_ns).all()


def test_options_that_are_not_there_are_refused() -> None:
    append = Append(cache_id="c", kind=AppendKind.DECODE, token_ids=[5], options=b"")
    (message,) = sent([command_of(SentForward(1, 1, 9, append, 1, 0, 1))])
    del message.decodes.options[:]
    with pytest.raises(ValueError, match="options"):
        worker_wire.to_decodes(message.decodes, SIZES)


@pytest.mark.parametrize("has_outputs", [False, True])
def test_results_are_those_of_forwards(*, has_outputs: bool) -> None:
    output = OutputSpec(top_logprobs=2) if has_outputs else GREEDY
    forwards = [Forward(op_id, op_id, 5, [1], output=output, kind=Kind.DECODE) for op_id in (3, 1 << 61)]
    for forward, token in zip(forwards, (7, 999), strict=True):
        forward.outputs = (RowOutput(token),)
        forward.kept, forward.steps, forward.batch_items = 1, 1, 2
        forward.arrived_ns, forward.started_ns, forward.queue_ns = 10, 30, 20
    decodes = Decodes.done(forwards)
    if has_outputs:
        forwards[1].outputs[0].top_ids, forwards[1].outputs[0].top_logprobs = [1, 2], [-1.0, -2.0]
    for forward, compute_ns in zip(forwards, decodes.column(Column.COMPUTE_NS), strict=True):
        forward.compute_ns = compute_ns
    events = [worker_wire.to_event(forward) for forward in forwards]
    one_by_one = gateway_wire.to_events(worker_pb2.ConnectResponse(events=events))
    together = worker_wire.to_event(decodes)
    found = gateway_wire.to_events(worker_pb2.ConnectResponse(events=[together]))
    if not has_outputs:
        rows = [row for _, row in found if isinstance(row, answers.DecodeDone)]
        found = [(row.op_id, gateway_wire.decode_answer(row)) for row in rows]
    assert found == one_by_one


def test_columns_of_forwards_are_forwards_again() -> None:
    dice, forwards = random.Random(1), list[Forward]()
    for command in taken(sent([attempt(dice, op_id) for op_id in range(1, 200)])):
        assert isinstance(command, Forward)
        if command.is_plain:
            forwards.append(command)
    again = Decodes.of(forwards).forwards()
    assert [(described(one), one.arrived_ns) for one in again] == [
        (described(one), one.arrived_ns) for one in forwards
    ]
