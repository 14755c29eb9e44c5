"""The parts of generated texts, as `execute` returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire._enums import FinishReason, name_of
from quire.errors import QuireError, from_status
from quire.v1 import runner_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next part of one sample.

    Attributes:
        item_id: Of its item.
        sample: The number of the sample, of an item's `n`.
        position: The length of the sample before this chunk: in tokens, or in chunks if the runtime does not
            report tokens.
        text: Whole characters only.
        token_ids: Empty if the runtime does not report tokens.
        logprobs: One for each token, if `logprobs` or `sampled_logprobs` asked for them. After a restart of
            the server those of tokens that it read from its journal are missing.
        tool_calls: Parts of calls: first the id and the name, then `arguments_json` in pieces.
        finish_reason: None: the sample goes on.
        stop: The stop text that ended the sample.
        error: Why the sample failed, with the `finish_reason` "error".
        usage: In the last chunk.
        runtime: Of this item, if another one than that of `Execution.started` runs it.
        kv_cache: In the last chunk of an item that continues a cache: the cache by then.
        hidden: One for each token, if `hidden` asked for them.
        experts: One for each token, if `experts` asked for them: of its row's token. See `quire.expert_ids`.
        weights_version: With which weights the tokens were computed. None: not known, as of a provider.
        reasoning_content: More of the thoughts, before `text`.
        malformed_calls: Calls that are none, by their indexes: all the text of each.
    """

    item_id: str
    sample: int
    position: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[runner_pb2.TokenLogprob]
    tool_calls: Sequence[runner_pb2.ToolCall]
    finish_reason: FinishReason | None
    stop: str
    error: QuireError | None
    usage: runner_pb2.Usage | None
    runtime: str
    kv_cache: types_pb2.KvCacheHandle | None = None
    hidden: Sequence[runner_pb2.TokenHidden] = ()
    weights_version: int | None = None
    reasoning_content: str = ""
    malformed_calls: Mapping[int, str] = field(default_factory=dict)
    experts: Sequence[bytes] = ()


@dataclass(slots=True)
class Answer:
    """One sample as a whole.

    Attributes:
        item_id: Of its item. `sample`: its number, of an item's `n`.
        text: Without thoughts and calls, if the sample was divided.
        reasoning_content: Its thoughts.
        tool_calls: In their order, whole.
        finish_reason: "tool_calls" if there are any.
    """

    item_id: str
    sample: int
    text: str = ""
    reasoning_content: str = ""
    tool_calls: list[runner_pb2.ToolCall] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: runner_pb2.Usage | None = None

    @property
    def message(self) -> dict[str, Any]:
        """It as a message, to send back before the results of its calls."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message |= {"content": self.text or None, "tool_calls": self.tool_calls}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        return message

    def add(self, chunk: Chunk) -> None:
        """Adds its next chunk, in which malformed calls are text."""
        begun = {call.index for call in self.tool_calls}
        malformed = chunk.malformed_calls.items()
        self.text += "".join(text for index, text in malformed if index in begun) + chunk.text
        self.text += "".join(text for index, text in malformed if index not in begun)
        self.reasoning_content += chunk.reasoning_content
        for part in chunk.tool_calls:
            call = next((call for call in self.tool_calls if call.index == part.index), None)
            if call is None:
                call = runner_pb2.ToolCall(index=part.index)
                self.tool_calls.append(call)
            call.id, call.name = call.id or part.id, call.name or part.name
            call.arguments_json += part.arguments_json
        self.tool_calls = [call for call in self.tool_calls if call.index not in chunk.malformed_calls]
        self.finish_reason, self.usage = chunk.finish_reason, chunk.usage


def chunk_of(message: runner_pb2.SampleChunk) -> Chunk:
    """The chunk in a message."""
    return Chunk(
        item_id=message.item_id,
        sample=message.sample,
        position=message.position,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(message.logprobs),
        tool_calls=tuple(message.tool_calls),
        finish_reason=name_of(runner_pb2.FinishReason, message.finish_reason),
        stop=message.stop,
        error=from_status(message.error) if message.HasField("error") else None,
        usage=message.usage if message.HasField("usage") else None,
        runtime=message.runtime,
        kv_cache=message.kv_cache if message.HasField("kv_cache") else None,
        hidden=tuple(message.hidden),
        weights_version=message.weights_version if message.HasField("weights_version") else None,
        reasoning_content=message.reasoning_content,
        malformed_calls=dict(message.malformed_calls),
        experts=tuple(message.experts),
    )
