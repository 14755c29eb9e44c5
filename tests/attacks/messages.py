"""Requests that are cheap to send and were dear to look at, to compute, or to log."""

from __future__ import annotations

import itertools
from typing import Any

from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2 as types

from tests.attacks.frame import MIB, SERVICE, TIMEOUT_S, Attack, Scene
from tests.raw_messages import packed

_NUMBERS = itertools.count()


def on_session(scene: Scene, data: bytes) -> None:
    """One message on a Session of its own, read to its end."""
    assert scene.gateway.channel is not None
    method: Any = scene.gateway.channel.stream_stream(SERVICE + "Session")
    call = method(iter([data]), timeout=TIMEOUT_S)
    try:
        answers = sum(1 for _ in call)
    except Exception:
        answers = 0
    scene.notes["messages of answers"] = scene.notes.get("messages of answers", 0) + answers
    scene.count(call)


def empty_calls(scene: Scene) -> None:
    on_session(scene, b"\x0a\x00" * 900_000)


def as_many_calls_as_allowed(scene: Scene) -> None:
    message = pb.SessionRequest(calls=[pb.SessionCall(tag=tag) for tag in range(4096)])
    on_session(scene, message.SerializeToString())


def empty_items(scene: Scene) -> None:
    scene.send("BatchPrefill", b"\x0a\x00" * 131_072)


def large_mask(scene: Scene) -> None:
    # Of 14 million ids, all the same.
    mask = packed(5, packed(2, packed(1, b"\x01" * 14_000_000)))
    scene.send("Forward", packed(1, b"\x05" * 256) + packed(2, mask))


def largest_mask(scene: Scene) -> None:
    """As many ids as there are tokens, on many rows."""
    mask = types.TokenMask(allowed=types.TokenIds(ids=list(range(1024))))
    output = types.OutputOptions(mask=mask)
    scene.send("Forward", pb.ForwardRequest(token_ids=[5] * 256, output=output))


def scoring_with_penalties(scene: Scene) -> None:
    sampling = types.SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5)
    tokens = [(7 * i + next(_NUMBERS)) % 1000 for i in range(30_000)]
    scene.send("Forward", pb.ForwardRequest(token_ids=tokens, output=types.OutputOptions(sampling=sampling)))


def long_prompts(scene: Scene) -> None:
    prompt = packed(2, bytes([next(_NUMBERS) % 100]) * (15 * MIB))
    calls = [scene.start("Prefill", prompt) for _ in range(14)]
    for call in calls:
        scene.count(call)


def control_characters(scene: Scene) -> None:
    for text in ("\x1b[2J\x1b]0;mine\x07", "a\r\nlevel=error", "\x9b31m", "\u202e" + "x", "\x00"):
        scene.send("Prefill", pb.PrefillRequest(token_ids=[1], request_id=text))
        scene.send("Decode", pb.DecodeRequest(cache_id=text, token_id=1))
    raw = scene.gateway.log_path.read_bytes()
    scene.notes["control bytes in the log"] = sum(byte < 32 and byte != 10 for byte in raw)


ATTACKS = (
    Attack("empty calls", "900,000 empty calls in a message of a Session", empty_calls, tries=20),
    Attack(
        "full message",
        "4,096 empty calls in a message, as many as one may have",
        as_many_calls_as_allowed,
        tries=30,
    ),
    Attack("empty items", "131,072 empty items of a BatchPrefill", empty_items, tries=20),
    Attack("large mask", "a mask of 14 million repeated ids on 256 rows", large_mask, tries=10),
    Attack("full mask", "a mask of all ids on 256 rows", largest_mask, tries=30),
    Attack("penalties", "a scoring of 30,000 tokens with penalties", scoring_with_penalties, tries=2),
    # Several are under way at once: gRPC receives them whole before anybody can look.
    Attack(
        "long prompts",
        "14 prompts of 15 MiB that are too long, at once",
        long_prompts,
        tries=3,
    ),
    Attack(
        "control characters",
        "escapes of terminals in ids",
        control_characters,
        tries=100,
        flags=("--log-level", "debug"),
    ),
)
