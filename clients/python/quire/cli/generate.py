"""`quire generate`: continues a prompt with Execute, and streams the output.

This command encodes text with the model's tokenizer, which it gets from the server. It sends messages to the
server, which renders the chat template in a sandbox, because a template is a program of the model's author.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tokenizers  # noqa: F401 - so that it is missed before a server is asked
from quire import Chunk, Client, QuireError, item
from quire.cli.connecting import NO_TIMEOUT_S, connected, when_ready
from quire.cli.terminal import CommandFailed, WrongUsage, stripped, tell
from quire.text import ModelTokenizer
from quire.v1 import executor_pb2, runner_pb2, types_pb2
from quire.v1.sampling_settings import SETTINGS

_SAMPLING = (*(setting.name for setting in SETTINGS), "seed")
# The server's own workers, because providers sample differently.
_RUNTIME = "local"
# The maximum length of a library's error message about a file from the server.
_MAX_ERROR_CHARS = 300


def generate(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status. Raises CommandFailed."""
    if options.prompt == "-":
        # Without the trailing newline, like `$(...)` in a shell.
        options.prompt = sys.stdin.buffer.read().decode(errors="surrogateescape").removesuffix("\n")
    _check_prompt(options)
    with connected(options) as client:
        info = when_ready(
            client, lambda: client.model_info(include_tokenizer=True, include_chat_template=True)
        )
        tokenizer = _tokenizer(info)
        asked = item(
            _prompt(tokenizer, info, options),
            item_id="prompt",
            sampling=_sampling(info.sampling_defaults, options),
            max_tokens=options.max_tokens,
            logprobs=options.logprobs,
            adapter_id=options.adapter,
        )
        screen = _Printer(
            info.model.eos_token_ids, has_text=tokenizer is not None, with_logprobs=options.logprobs
        )
        try:
            for chunk in _chunks(client, asked):
                screen.show(chunk)
        except QuireError as error:
            if error.reason == "BAD_CHAT":
                raise WrongUsage(f"{error.message}; --raw sends the text as it is") from None
            raise
        finally:
            screen.finish()
    return 0


def _check_prompt(options: argparse.Namespace) -> None:
    """Raises WrongUsage for options that are invalid with every model."""
    for text in (options.prompt, options.system):
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise WrongUsage("the prompt holds bytes that are not UTF-8") from None
    if options.tokens is not None and options.chat:
        raise WrongUsage("--chat goes with a message, not with --tokens")
    if options.system is not None and (options.raw or options.tokens is not None):
        raise WrongUsage("--system goes with a message, not with --raw or --tokens")


def _chunks(client: Client, asked: runner_pb2.ExecuteItem) -> Iterator[Chunk]:
    """The chunks of an item, which is cancelled when the loop over them ends. Raises QuireError."""

    def generated() -> Iterator[Chunk]:
        with client.execute([asked], runtime=_RUNTIME, timeout_s=NO_TIMEOUT_S) as execution:
            yield from execution

    def begun() -> Iterator[Chunk]:
        chunks = generated()
        # Reading the first chunk fails if there is no worker.
        return itertools.chain([*itertools.islice(chunks, 1)], chunks)

    return when_ready(client, begun)


class _Printer:
    """Prints the output: text, ids if there is no tokenizer, or a line for each token."""

    def __init__(self, end_ids: Collection[int], *, has_text: bool, with_logprobs: bool) -> None:
        self._end_ids = end_ids
        self._has_text = has_text
        self._with_logprobs = with_logprobs
        self._line_is_open = False

    def show(self, chunk: Chunk) -> None:
        """Prints a chunk immediately."""
        token_ids = list(chunk.token_ids)
        if chunk.finish_reason and token_ids and token_ids[-1] in self._end_ids:
            # Do not print the end token.
            token_ids.pop()
        if self._with_logprobs:
            self._show_lines(token_ids, chunk)
            return
        shown = stripped(chunk.text) if self._has_text else "".join(f"{token_id} " for token_id in token_ids)
        print(shown, end="", flush=True)
        self._line_is_open = self._line_is_open or bool(token_ids or shown)

    def _show_lines(self, token_ids: Sequence[int], chunk: Chunk) -> None:
        """Prints a line for each token. The text of several tokens is printed with the last of them."""
        for index, (token_id, entry) in enumerate(zip(token_ids, chunk.logprobs, strict=False), start=1):
            text = chunk.text if index == len(token_ids) else ""
            print(f"{token_id}\t{entry.logprob:.4f}" + (f"\t{text!r}" if self._has_text else ""), flush=True)
        if chunk.text and not token_ids:
            # Of earlier tokens: it was known only at the end.
            print(f"\t\t{chunk.text!r}", flush=True)

    def finish(self) -> None:
        """Ends the line."""
        if self._line_is_open:
            print(flush=True)


def _tokenizer(info: executor_pb2.GetModelInfoResponse) -> ModelTokenizer | None:
    """The tokenizer, or None if the model has none. Raises CommandFailed."""
    try:
        return ModelTokenizer(info) if info.tokenizer_json else None
    except QuireError as error:
        raise CommandFailed(error.message[:_MAX_ERROR_CHARS]) from None


def _prompt(
    tokenizer: ModelTokenizer | None, info: executor_pb2.GetModelInfoResponse, options: argparse.Namespace
) -> Any:
    """The prompt as messages or tokens. Raises WrongUsage, CommandFailed."""
    if options.tokens is not None:
        return options.tokens
    if tokenizer is None:
        raise WrongUsage("this model has no tokenizer: give token ids with --tokens 1,2,3")
    if options.raw or not info.HasField("chat_template"):
        if options.chat or options.system is not None:
            raise WrongUsage("this model has no chat template: without --chat and --system it continues text")
        return _encoded(tokenizer, options.prompt)
    messages = [{"role": "user", "content": options.prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    for message in messages:
        _encoded(tokenizer, message["content"])
    return messages


def _encoded(tokenizer: ModelTokenizer, text: str) -> list[int]:
    """The tokens of a text. Warns on standard error about characters that the tokenizer does not know."""
    library = tokenizer.library
    try:
        encoded = library.encode(text)
    except Exception as error:  # the library has no exception class of its own
        reason = f"the model's tokenizer.json cannot be used: {error}"
        raise CommandFailed(reason[:_MAX_ERROR_CHARS]) from None
    # Byte-level tokenizers have none, because every text has tokens.
    name = getattr(library.model, "unk_token", None)
    unknown_id = None if name is None else library.token_to_id(name)
    places = [at for token_id, at in zip(encoded.ids, encoded.offsets, strict=True) if token_id == unknown_id]
    if unknown := dict.fromkeys(text[start:end] for start, end in places):
        tell(f"warning: the model's tokenizer does not know: {' '.join(unknown)}")
    return list(encoded.ids)


def _sampling(defaults: types_pb2.SamplingParams, options: argparse.Namespace) -> types_pb2.SamplingParams:
    """The model's recommended settings, overridden by the flags. The server checks the values."""
    given = {name: getattr(options, name) for name in _SAMPLING if getattr(options, name) is not None}
    sampling = types_pb2.SamplingParams()
    sampling.CopyFrom(defaults)
    sampling.MergeFrom(types_pb2.SamplingParams(**given))
    return sampling
