"""Parses the output of a model into content, thoughts and tool calls, while it is generated.

One parser for all families, whose formats are in `output_formats`. It reads character by character
(`answer_reader`), so that the parts of a text do not depend on the pieces in which it comes. Where no marker
can begin, it takes whole pieces.

A call begins when its name is known. Text that turns out to be no call before that is content. A call that
turns out to be malformed later is *broken*: in a stream, its arguments end there; for others its text is
content.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import string
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from service.text.answer_reader import MAX_ARGUMENT_CHARACTERS, MAX_HELD_CHARACTERS, AnswerReader, BrokenCall
from service.text.call_values import (
    MAX_CALLS,
    NoCall,
    call_of_object,
    calls_of_python,
    is_name,
    object_of_bare_keys,
    typed_value,
)
from service.text.json_scanner import JsonScanner
from service.text.output_formats import MAX_HEAD_CHARACTERS, Arguments, OutputFormats, ToolFormat

# The most characters that are read again, in all, because a section had no call. After that such sections are
# content at once, so that the time stays proportional to the length of an answer.
_MAX_READ_AGAIN = 1 << 13
_SPACES = " \t\r\n"
# The most spaces that are held back, since they may come before a call, where they have no meaning.
_MAX_HELD_SPACES = 256
_ID_CHARACTERS = string.ascii_letters + string.digits
# The beginning of a call as an object, up to the arguments.
_CALL_OBJECT = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
_MESSAGE = "<|message|>"
_RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[\w.\-]+)")


@dataclass(frozen=True, slots=True)
class Part:
    """The next part of an answer; one field is set.

    Attributes:
        begun: The id and the name of a call that begins.
        arguments: A piece of a call's arguments.
        broken: The text of a malformed call.
        index: The number of the call, in the order in which calls begin.
    """

    content: str = ""
    thoughts: str = ""
    begun: tuple[str, str] | None = None
    arguments: str = ""
    broken: str = ""
    index: int = 0


def _kind(part: Part) -> tuple[str, int]:
    kinds = ("content", "thoughts", "arguments", "begun", "broken")
    return next(kind for kind in kinds if getattr(part, kind)), part.index


# Receives characters, and an empty text at the end; sends nothing.
_Reading: TypeAlias = Generator[None, str, Any]


class OutputParser:
    """Parses one answer. `push` its pieces in order, then `end`."""

    def __init__(
        self,
        formats: OutputFormats,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        max_calls: int = MAX_CALLS,
        is_thinking: bool = False,
        goes_on: bool = False,
        dropped: Collection[str] = (),
        call_key: str = "",
    ) -> None:
        """`tools`: by the name of a function, the schema of its arguments. Empty: there are no calls.

        `max_calls`: further calls are left out. `is_thinking`: the answer begins within thoughts, and with
        `goes_on` these began in an earlier answer. `dropped`: texts that are left out. `call_key`: determines
        the ids of calls.
        """
        self._call_key = call_key
        self._tools = tools
        self._max_calls = max_calls
        messages = formats.tools is not None and formats.tools.arguments is Arguments.MESSAGE
        self._format = formats.tools if tools or messages else None
        self._reasoning = formats.reasoning
        self._markers = frozenset((*dropped, *self._begins()))
        self._num_read_again = 0
        self.num_calls = 0
        self.is_thinking = is_thinking
        self._parts: list[Part] = []
        # Spaces that are held back, and those before the call that began last.
        self._spaces = self._spaces_before = ""
        # Whether spaces at the beginning of the next text are dropped.
        self._drops_spaces = is_thinking and not goes_on
        # `consumed` is what was read since the beginning of a section.
        self._input = AnswerReader()
        # Where the next piece can be taken up to; None: it has to be read by characters.
        self._plain: re.Pattern[str] | None = None
        self._parsing = self._answer()
        next(self._parsing)

    def push(self, text: str) -> list[Part]:
        """Takes the next piece of the answer. Returns the parts that are known now."""
        at = 0
        while at < len(text):
            if self._plain is not None:
                found = self._plain.search(text, at)
                end = len(text) if found is None else found.start()
                self._say(text[at:end])
                at = end
            if at < len(text):
                self._parsing.send(text[at])
                at += 1
        return self._taken()

    def end(self) -> list[Part]:
        """The answer has ended. Returns the last parts."""
        self._input.has_ended = True
        for _ in self._parsing:
            pass
        return self._taken()

    def _taken(self) -> list[Part]:
        """The parts since the last call, with consecutive parts of one kind merged."""
        parts, self._parts = self._parts, []
        merged: list[Part] = []
        for (kind, index), group in groupby(parts, _kind):
            if kind in ("content", "thoughts", "arguments"):
                texts: dict[str, Any] = {kind: "".join(getattr(part, kind) for part in group)}
                merged.append(Part(**texts, index=index))
            else:
                merged.extend(group)
        return merged

    # Content and thoughts.

    def _begins(self) -> set[str]:
        begins = set(self._format.begins) if self._format is not None else set()
        if self._reasoning is not None and self._reasoning.begin:
            begins.add(self._reasoning.begin)
        if self._format is not None and self._format.arguments is Arguments.MESSAGE:
            begins.update(("<|end|>", "<|return|>", "<|call|>"))
        return begins

    def _answer(self) -> _Reading:
        if self.is_thinking:
            yield from self._thoughts()
        yield from self._unmarked_section()
        while marker := (yield from self._text(self._markers)):
            if self._reasoning is not None and marker == self._reasoning.begin:
                self._begin_thoughts()
                yield from self._thoughts()
                yield from self._unmarked_section()
            elif self._format is not None and marker in self._format.begins:
                yield from self._section(self._format, marker)
        if not self.num_calls:
            self._say_spaces()

    def _begin_thoughts(self) -> None:
        self._spaces = ""
        self.is_thinking = self._drops_spaces = True

    def _thoughts(self) -> _Reading:
        assert self._reasoning is not None
        if not (yield from self._text(frozenset((self._reasoning.end,)))):
            # The thoughts may continue in another answer.
            self._say_spaces()
        self._spaces = ""
        self.is_thinking, self._drops_spaces = False, True

    def _text(self, markers: frozenset[str]) -> Generator[None, str, str]:
        """Reads text up to one of the markers, which it returns; empty: the text has ended."""
        plain, beginnings = _beginnings(markers)
        held = ""
        while True:
            if not held and self._input.is_behind:
                self._say(self._input.read_ahead(plain))
            self._plain = None if held or self._input.is_behind else plain
            char = yield from self._input.read()
            self._plain = None
            self._input.consumed.clear()
            if not char:
                self._say(held)
                return ""
            held += char
            while held and held not in beginnings:
                self._say(held[0])
                held = held[1:]
            if held in markers:
                return held

    def _say(self, text: str) -> None:
        """Adds content or thoughts, but holds back spaces, which may be dropped."""
        text = self._spaces + text
        if self._drops_spaces:
            text = text.lstrip(_SPACES)
        held = max(len(text.rstrip(_SPACES)), len(text) - _MAX_HELD_SPACES)
        self._spaces = text[held:]
        if held:
            self._drops_spaces = False
            self._add_text(text[:held])

    def _say_spaces(self) -> None:
        if self._spaces and not self._drops_spaces:
            self._add_text(self._spaces)
        self._spaces = ""

    def _add_text(self, text: str) -> None:
        self._parts.append(Part(thoughts=text) if self.is_thinking else Part(content=text))

    # Sections of calls.

    def _unmarked_section(self) -> _Reading:
        """The whole answer, if it is a section that nothing begins. Otherwise nothing is read."""
        form = self._format
        if form is None or not form.first:
            return
        if (yield from self._input.match(" " + form.first)) is not None:
            self._input.unread(len(self._input.consumed))
            yield from self._section(form, "")

    def _section(self, form: ToolFormat, marker: str) -> _Reading:
        """Calls after a marker. If there is none, the marker is content, and what follows is read again."""
        before, begin = self.num_calls, marker
        try:
            if form.arguments is Arguments.MESSAGE:
                yield from self._message(form)
                return
            yield from self._input.expect(form.opening)
            yield from self._call(form, marker, is_marked=bool(marker))
            while form.between is not None:
                self._input.consumed.clear()
                begin = ""
                if (yield from self._input.match(form.between)) is None:
                    break
                yield from self._call(form, is_marked=bool(marker))
        except NoCall:
            if self.num_calls == before:
                self._say(marker)
            self._num_read_again += len(self._input.consumed)
            if self._num_read_again > _MAX_READ_AGAIN:
                self._say("".join(self._input.consumed))
                self._input.consumed.clear()
                return
            self._input.unread(len(self._input.consumed))
            if self.num_calls == before:
                return
        except BrokenCall:
            self._add_to_call(broken=self._spaces_before + begin + "".join(self._input.consumed))
            self._drops_spaces = False
            return
        # Models may leave it out.
        yield from self._input.match(form.closing)

    def _call(self, form: ToolFormat, marker: str = "", *, is_marked: bool) -> _Reading:
        """A call, or several where these are one text. Raises NoCall or BrokenCall.

        `marker`: what was read just before, which may be the beginning of its head.
        """
        head = yield from self._input.expect(*(text.removeprefix(marker) for text in form.head))
        if form.arguments is Arguments.CALL_OBJECT:
            yield from self._call_object(form, is_marked=is_marked)
        elif form.arguments is Arguments.PYTHON:
            yield from self._python_calls(form, is_marked=is_marked)
        elif form.arguments is Arguments.BARE_KEYS:
            yield from self._bare_keys(form, head["name"])
        elif form.arguments is Arguments.PAIRS:
            yield from self._pairs(form, head["name"])
            return
        else:
            given_id = head.get("id", "")
            name = head.get("name") or given_id.rpartition(":")[0].removeprefix("functions.")
            yield from self._arguments(form, name, given_id)
        # Models may leave it out.
        yield from self._input.match(form.tail)

    def _begin(self, form: ToolFormat, name: str, given_id: str = "", *, is_marked: bool = True) -> None:
        """A call begins. Raises NoCall if it is none."""
        if not is_name(name) or self.num_calls >= MAX_CALLS:
            raise NoCall
        if not is_marked and name not in self._tools:
            raise NoCall
        self._spaces_before, self._spaces, self._drops_spaces = self._spaces, "", True
        self.num_calls += 1
        self._add_to_call(begun=(given_id or self._new_id(form), name))

    def _new_id(self, form: ToolFormat) -> str:
        """An id for the call that begins: the same if the answer is read again."""
        data = hashlib.shake_128(f"{self._call_key}\0{self.num_calls}".encode())
        characters = "".join(_ID_CHARACTERS[each % 62] for each in data.digest(form.id_characters or 24))
        return characters if form.id_characters else f"call_{characters}"

    def _add_to_call(self, **what: Any) -> None:
        """Adds a part of the call that has begun last."""
        if self.num_calls <= self._max_calls:
            self._parts.append(Part(**what, index=self.num_calls - 1))

    def _add_arguments(self, text: str) -> None:
        self._add_to_call(arguments=text)

    def _arguments(self, form: ToolFormat, name: str, given_id: str = "") -> _Reading:
        """A call whose arguments are an object. Raises NoCall or BrokenCall."""
        char = yield from self._input.read()
        self._input.unread(len(char))
        if char != "{":
            raise NoCall
        self._begin(form, name, given_id)
        scanner, size = JsonScanner(), 0
        while not scanner.is_complete:
            char = yield from self._input.read_json(scanner)
            size += 1
            if not char or size > MAX_ARGUMENT_CHARACTERS:
                raise BrokenCall
            self._add_arguments(char)

    def _call_object(self, form: ToolFormat, *, is_marked: bool) -> _Reading:
        """A call as an object with its name and its arguments. Raises NoCall or BrokenCall."""
        scanner, text = JsonScanner(), ""
        has_begun = is_in_arguments = False
        while not scanner.is_complete:
            char = yield from self._input.read_json(scanner)
            text += char
            most = MAX_ARGUMENT_CHARACTERS if has_begun else MAX_HELD_CHARACTERS
            if not char or len(text) > most:
                raise BrokenCall if has_begun else NoCall
            begins = not has_begun and char == "{" and scanner.depth == 2
            if begins and (match := _CALL_OBJECT.fullmatch(text)):
                self._begin(form, match["name"], is_marked=is_marked)
                has_begun = is_in_arguments = True
            if is_in_arguments:
                self._add_arguments(char)
                is_in_arguments = scanner.depth > 1
        if not has_begun:
            name, arguments = call_of_object(text)
            self._begin(form, name, is_marked=is_marked)
            self._add_arguments(arguments)

    def _pairs(self, form: ToolFormat, name: str) -> _Reading:
        """The arguments as keys and values, and the end of the call. Raises NoCall or BrokenCall."""
        ends = [form.tail + form.closing, *([form.tail] if form.tail.strip() else [])]
        key = yield from self._input.match(" " + form.key)
        if key is None:
            yield from self._input.expect(*ends)
        self._begin(form, name)
        before = "{"
        while key is not None:
            value = yield from self._input.until(form.value_end)
            is_text = key.get("text") == "true"
            typed = (
                json.dumps(value) if is_text else typed_value(value, self._tools.get(name, {}), key["key"])
            )
            self._add_arguments(f"{before}{json.dumps(key['key'])}: {typed}")
            before = ", "
            key = yield from self._input.match(" " + form.key)
            if key is None and (yield from self._input.match(*ends)) is None:
                raise BrokenCall
        self._add_arguments("{}" if before == "{" else "}")

    def _python_calls(self, form: ToolFormat, *, is_marked: bool) -> _Reading:
        """A list of calls as in Python. Raises NoCall."""
        text = yield from self._input.bracketed("'\"", "\\")
        calls = calls_of_python(text, self._tools if not is_marked else None)
        if self.num_calls + len(calls) > MAX_CALLS:
            raise NoCall
        for name, arguments in calls:
            self._begin(form, name)
            self._add_arguments(arguments)

    def _bare_keys(self, form: ToolFormat, name: str) -> _Reading:
        """The arguments as an object with bare keys. Raises NoCall."""
        text = yield from self._input.bracketed((form.value_end,))
        arguments = object_of_bare_keys(text, form.value_end)
        self._begin(form, name)
        self._add_arguments(arguments)

    def _message(self, form: ToolFormat) -> _Reading:
        """A message of gpt-oss: a call, or the beginning of thoughts or content."""
        head = ""
        while not head.endswith(_MESSAGE):
            char = yield from self._input.read()
            head += char
            if not char or len(head) > MAX_HEAD_CHARACTERS:
                raise NoCall
        recipient = _RECIPIENT.search(head)
        if recipient and self._tools:
            yield from self._input.match(" ")
            yield from self._arguments(form, recipient["name"])
        elif "analysis" in head and self._reasoning is not None:
            self._begin_thoughts()
            yield from self._thoughts()
        else:
            self._spaces, self._drops_spaces = "", True


@functools.lru_cache(64)
def _beginnings(markers: frozenset[str]) -> tuple[re.Pattern[str], frozenset[str]]:
    """A pattern for the first character of a marker, and all beginnings of markers."""
    firsts = "".join(sorted({marker[0] for marker in markers}))
    found = frozenset(marker[:end] for marker in markers for end in range(1, len(marker) + 1))
    return re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)"), found
