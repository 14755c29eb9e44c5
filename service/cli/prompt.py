"""What a user typed as the tokens of a prompt: a message in the model's chat template, text, or token ids."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quire.v1 import executor_pb2

from service.printable import escaped
from service.text.chat_template import TemplateError, render_chat

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


# Of what a library says of a server's file.
_MOST_SHOWN = 300


class BadPrompt(Exception):
    """The prompt cannot be turned into tokens."""


class BadTokenizer(Exception):
    """The tokenizer that the server hands out cannot be used."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the model's tokenizer.json cannot be used: {escaped(str(error))[:_MOST_SHOWN]}")


def check_prompt(options: argparse.Namespace) -> None:
    """Raises BadPrompt for options that contradict each other, whatever the model."""
    for text in (options.prompt, options.system):
        if text is not None and not _is_sound(text):
            raise BadPrompt("the prompt holds bytes that are not UTF-8")
    if options.tokens is not None and options.chat:
        raise BadPrompt("--chat goes with a message, not with --tokens")
    if options.system is not None and (options.raw or options.tokens is not None):
        raise BadPrompt("--system goes with a message, not with --raw or --tokens")


def _is_sound(text: str) -> bool:
    """Whether an argument was made of whole characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def prompt_ids(
    tokenizer: Tokenizer | None, info: executor_pb2.GetModelInfoResponse, options: argparse.Namespace
) -> list[int]:
    """The tokens of the prompt that the options of `quire generate` have. Raises BadPrompt, BadTokenizer."""
    if options.tokens is not None:
        return list(options.tokens)
    if tokenizer is None:
        raise BadPrompt("this model has no tokenizer: give token ids with --tokens 1,2,3")
    text, is_chat = _prompt_text(info, options)
    # A template writes special tokens itself.
    try:
        encoded = tokenizer.encode(text, add_special_tokens=not is_chat)
    except Exception as error:  # the library has no kind of its own
        raise BadTokenizer(error) from None
    _warn_of_unknown(tokenizer, encoded, text)
    return list(encoded.ids)


def _prompt_text(info: executor_pb2.GetModelInfoResponse, options: argparse.Namespace) -> tuple[str, bool]:
    """The text of the prompt, and whether it is what a template made of it. Raises BadPrompt."""
    if options.raw or not info.HasField("chat_template"):
        if options.chat or options.system is not None:
            raise BadPrompt("this model has no chat template: without --chat and --system it continues text")
        return options.prompt, False
    messages = [{"role": "user", "content": options.prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    try:
        return render_chat(info.chat_template, messages), True
    except TemplateError as error:
        raise BadPrompt(f"{error}; --raw sends the text as it is") from None


def _warn_of_unknown(tokenizer: Tokenizer, encoded: Encoding, text: str) -> None:
    """Names on standard error what the tokenizer has no token of its own for."""
    # Not every kind of model has one: with all bytes as tokens nothing is unknown.
    name = getattr(tokenizer.model, "unk_token", None)
    unknown_id = None if name is None else tokenizer.token_to_id(name)
    places = [at for token_id, at in zip(encoded.ids, encoded.offsets, strict=True) if token_id == unknown_id]
    unknown = dict.fromkeys(text[start:end] for start, end in places)
    if unknown:
        named = " ".join(escaped(part) for part in unknown)
        print(f"quire: the model's tokenizer does not know: {named}", file=sys.stderr)
