"""What a forward asks for is decoded once for all who ask for the same, and each has its own all the same."""

from __future__ import annotations

import pytest
from quire.v1 import types_pb2

from tests.workers.gateway_end import forward_command
from workers import wire
from workers.common import worker_pb2
from workers.forward_options import ModelSizes
from workers.operations import Accept, Forward

VOCAB = 64


def decoded(options: worker_pb2.ForwardOptions, *, default_seed: int = 0, keep_all: bool = False) -> Forward:
    return taken(options, "DECODE", ModelSizes(VOCAB), default_seed=default_seed, keep_all=keep_all)


def taken(options: worker_pb2.ForwardOptions, kind: str, sizes: ModelSizes, **more: object) -> Forward:
    """What a worker makes of a forward with these options."""
    sent = forward_command(1, 1, [1], kind, options=options.SerializeToString(), **more)
    command = wire.to_command(sent, sizes)
    assert isinstance(command, Forward)
    return command


def seed_of(command: Forward) -> int:
    assert command.output.sampling is not None
    return command.output.sampling.seed


def drawn(seed: int | None = None) -> worker_pb2.ForwardOptions:
    sampling = types_pb2.SamplingParams(temperature=1.0, seed=seed)
    return worker_pb2.ForwardOptions(rows=1, output=types_pb2.OutputOptions(sampling=sampling))


def test_the_default_seed_is_for_those_without_one() -> None:
    assert [seed_of(decoded(drawn(), default_seed=seed)) for seed in (5, 6, 5)] == [5, 6, 5]
    assert [seed_of(decoded(drawn(0), default_seed=seed)) for seed in (5, 6)] == [0, 0]


def test_a_repetition_that_is_computed_again_keeps_all() -> None:
    options = worker_pb2.ForwardOptions(rows=1, accept=types_pb2.VERIFY_ACCEPT_GREEDY)
    accepts = [decoded(options, keep_all=keep_all).accept for keep_all in (False, True, False)]
    assert accepts == [Accept.CHOSEN, Accept.ALL, Accept.CHOSEN]


def test_masks_are_not_remembered() -> None:
    """A few bytes that were sent may be many here."""
    mask = types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=[VOCAB - 1]))
    of_all = worker_pb2.ForwardOptions(rows=1, output=types_pb2.OutputOptions(mask=mask))
    assert decoded(of_all).output.mask == decoded(of_all).output.mask
    assert decoded(of_all).output.mask is not decoded(of_all).output.mask
    of_a_row = worker_pb2.ForwardOptions(rows=1, verify_rows=[types_pb2.VerifyRow(mask=mask)])
    assert decoded(of_a_row).choices[0] is not decoded(of_a_row).choices[0]


def given(data: bytes, start: int = 0, sizes: tuple[int, int, int] = (2, 6, 3), salt: bytes = b"") -> Forward:
    options = worker_pb2.ForwardOptions(rows=1, experts=data, experts_from=start)
    return taken(options, "SCORE", ModelSizes(VOCAB, 0, *sizes), salt=salt)


def test_given_experts_have_the_shape_of_the_model() -> None:
    experts = given(bytes([0, 1, 2, 3, 4, 5] * 2), 7).experts
    assert experts is not None and experts.start == 7
    assert experts.ids.tolist() == [[[0, 1, 2], [3, 4, 5]]] * 2
    wide = given(bytes([1, 1, 44, 1, 0, 0]), sizes=(1, 301, 3)).experts
    assert wide is not None and wide.ids.tolist() == [[[257, 300, 0]]]


@pytest.mark.parametrize(
    ("data", "sizes"),
    [
        (b"\x00" * 5, (2, 6, 3)),
        (b"\x00\x01\x02\x03\x04\x06", (2, 6, 3)),
        (b"\x00" * 5, (1, 300, 2)),
        (b"\x2c\x01\x00\x00", (1, 300, 2)),
        (b"\x00", (0, 0, 0)),
    ],
)
def test_experts_that_the_model_does_not_have(data: bytes, sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"experts?|reshape|buffer"):
        given(data, sizes=sizes)


def test_a_salt_is_for_the_given_experts_and_for_who_gives_them() -> None:
    first, second = bytes([0, 1, 2, 3, 4, 5]), bytes([0, 1, 2, 3, 5, 4])
    salts = [
        given(b"").salt,
        given(b"", salt=b"2:me").salt,
        given(first).salt,
        given(first, salt=b"2:me").salt,
        given(second).salt,
        given(first, 1).salt,
        given(first + first).salt,
    ]
    assert salts[:2] == [b"", b"2:me"] and len(set(salts)) == len(salts)
    assert given(first).salt == salts[2]
