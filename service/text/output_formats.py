"""How models write tool calls and thoughts: one table, by families, with the names that vLLM has for them.

Which of them a model writes is seen in its chat template, which shows the model how it has to.
"""

# ruff: noqa: RUF001 - DeepSeek's markers have a wide bar.

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from service.setting_rules import AUTO

_Format = TypeVar("_Format", "ToolFormat", "ReasoningFormat")
# The most characters between the arguments of calls: names and markers.
MAX_HEAD_CHARACTERS = 512


class Pattern:
    """Texts of which a parser expects one: literal characters, and what stands for others.

    Spaces are any whitespace, none included; {name}, {id} and {key} are what they say, {word} is not used.
    {text}: "true" before a value that is a text.
    """

    # Several spaces are one atom: each more would square the time of a search.
    _ATOMS = re.compile(r"\{(\w+)\}|( +|.)", re.DOTALL)
    _CLASSES = {  # noqa: RUF012 - constant
        "name": r"(?P<name>[\w.\-]+)",
        "id": r"(?P<id>[\w.:\-]+)",
        "key": r"(?P<key>[^<>\n]+)",
        "text": r"(?P<text>true|false)",
        "word": r"\w+",
    }

    def __init__(self, *texts: str) -> None:
        self._whole: list[re.Pattern[str]] = []
        self._begins: list[re.Pattern[str]] = []
        for text in texts:
            atoms = [self._atom(match) for match in self._ATOMS.finditer(text)]
            self._whole.append(re.compile("".join(atoms)))
            # Each atom is optional together with all after it.
            begin = functools.reduce(lambda rest, atom: f"(?:{atom}{rest})?", reversed(atoms), "")
            self._begins.append(re.compile(begin))

    def match(self, text: str) -> dict[str, str] | None:
        """The values of the placeholders, if this is one of the texts."""
        for pattern in self._whole:
            if match := pattern.fullmatch(text):
                return match.groupdict()
        return None

    def may_begin_with(self, text: str) -> bool:
        """Whether more characters can make it one of the texts."""
        return len(text) <= MAX_HEAD_CHARACTERS and any(begin.fullmatch(text) for begin in self._begins)

    @classmethod
    def _atom(cls, match: re.Match[str]) -> str:
        placeholder, literal = match.groups()
        if placeholder:
            return cls._CLASSES[placeholder]
        return r"\s*" if literal.startswith(" ") else re.escape(literal)


class Arguments(enum.Enum):
    """How a call is written, after its head."""

    # An object with the name and the arguments.
    CALL_OBJECT = enum.auto()
    # The arguments as an object; the head has the name.
    OBJECT = enum.auto()
    # Pairs of a key and a value, each between markers.
    PAIRS = enum.auto()
    # name(key=value), ... as in Python, in a list.
    PYTHON = enum.auto()
    # An object with bare keys, and texts between two of `value_end`; the head has the name.
    BARE_KEYS = enum.auto()
    # A message with a recipient, in a channel.
    MESSAGE = enum.auto()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A section of calls: one of `begins`, `opening`, calls with `between` them, `closing`.

    One of `begins` may also be the beginning of `head`.

    What is written with spaces, from `opening` to `key`, are texts of a `Pattern`.

    Attributes:
        name: For `--tool-call-parser`.
        marks: The chat template has all of these.
        first: An answer that begins with this may be a section that nothing begins.
        head, tail: Before and after the arguments of each call.
        between: None: a section has one call.
        key, value_end: Before and after the value of a pair. Of BARE_KEYS `value_end` is around texts.
        id_characters: How long ids have to be. 0: any.
    """

    name: str
    marks: tuple[str, ...]
    begins: tuple[str, ...]
    arguments: Arguments
    first: str = ""
    opening: str = " "
    head: tuple[str, ...] = (" ",)
    tail: str = " "
    between: str | None = None
    closing: str = " "
    key: str = ""
    value_end: str = ""
    id_characters: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Thoughts are between two markers; without a `begin` they are messages of their own.

    Attributes:
        name: For `--reasoning-parser`.
        after: What a template writes between the end of thoughts and the answer.
        answer: What begins an answer without thoughts, if the template has not begun these.
    """

    name: str
    begin: str
    end: str
    after: str = ""
    answer: str = ""

    @property
    def opening(self) -> str:
        """The text that begins thoughts."""
        return self.begin or "<|channel|>analysis<|message|>"


# What this server makes a model write, by a grammar, if it has to call tools.
FORCED = ToolFormat(
    "forced", (), (), Arguments.CALL_OBJECT, first="[", opening=" [ ", between=" , ", closing=" ]"
)
_CALLS = ("<｜tool▁calls▁begin｜>",)
_CALL, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_CALL_END, _CALLS_END = "<｜tool▁call▁end｜>", " <｜tool▁calls▁end｜>"

# The first whose marks a template has is used.
TOOL_FORMATS = (
    # The prompt ends after the role, which a recipient may follow.
    ToolFormat(
        "openai", ("<|start|>", "<|channel|>", "<|message|>"), ("<|start|>", "<|channel|>"),
        Arguments.MESSAGE, first="to=",
    ),
    ToolFormat(
        "kimi_k2", ("<|tool_calls_section_begin|>",), ("<|tool_calls_section_begin|>",), Arguments.OBJECT,
        head=("<|tool_call_begin|> {id} <|tool_call_argument_begin|> ",),
        tail=" <|tool_call_end|>", between=" ", closing=" <|tool_calls_section_end|>",
    ),
    ToolFormat(
        "deepseek_v3", (*_CALLS, "```json"), _CALLS, Arguments.OBJECT,
        head=(_CALL + "{word}" + _SEP + "{name} ```json ",),
        tail=" ``` " + _CALL_END, between=" ", closing=_CALLS_END,
    ),
    ToolFormat(
        "deepseek_v31", _CALLS, _CALLS, Arguments.OBJECT,
        head=(_CALL + " {name} " + _SEP + " ",), tail=" " + _CALL_END, between=" ", closing=_CALLS_END,
    ),
    ToolFormat(
        "deepseek_v32", ("｜DSML｜", "function_calls>"), ("<｜DSML｜function_calls>",), Arguments.PAIRS,
        head=('<｜DSML｜invoke name="{name}"> ',), key='<｜DSML｜parameter name="{key}" string="{text}">',
        value_end="</｜DSML｜parameter>", tail=" </｜DSML｜invoke>", between=" ",
        closing=" </｜DSML｜function_calls>",
    ),
    ToolFormat(
        "minimax_m2", ("<minimax:tool_call>",), ("<minimax:tool_call>",), Arguments.PAIRS,
        head=('<invoke name="{name}"> ',), key='<parameter name="{key}">', value_end="</parameter>",
        tail=" </invoke>", between=" ", closing=" </minimax:tool_call>",
    ),
    ToolFormat(
        "mistral", ("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]",), Arguments.OBJECT,
        head=("{name}[ARGS] ", "{name}[CALL_ID]{word}[ARGS] "), id_characters=9,
    ),
    ToolFormat(
        "mistral_list", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), Arguments.CALL_OBJECT,
        opening=" [ ", between=" , ", closing=" ]", id_characters=9,
    ),
    ToolFormat(
        "glm45", ("<arg_key>",), ("<tool_call>",), Arguments.PAIRS,
        head=("{name} ",), key="<arg_key>{key}</arg_key> <arg_value>", value_end="</arg_value>",
        closing=" </tool_call>",
    ),
    ToolFormat(
        "seed_oss", ("<seed:tool_call>",), ("<seed:tool_call>",), Arguments.PAIRS,
        head=("<function={name}> ",), key="<parameter={key}>", value_end="</parameter>",
        tail=" </function>", closing=" </seed:tool_call>",
    ),
    ToolFormat(
        "functionary", ("<function=example_function_name>{",), ("<function=",), Arguments.OBJECT,
        head=("<function={name}> ",), tail=" </function>",
    ),
    ToolFormat(
        # It may leave out the first of these.
        "qwen3_coder", ("<function=", "<parameter="), ("<tool_call>", "<function="), Arguments.PAIRS,
        head=("<function={name}> ",), key="<parameter={key}>", value_end="</parameter>",
        tail=" </function>", closing=" </tool_call>",
    ),
    ToolFormat(
        "hunyuan_a13b", ("<tool_calls>[",), ("<tool_calls>",), Arguments.CALL_OBJECT,
        opening=" [ ", between=" , ", closing=" ] </tool_calls>",
    ),
    ToolFormat(
        "nemotron_json", ("<TOOLCALL>[",), ("<TOOLCALL>",), Arguments.CALL_OBJECT,
        opening=" [ ", between=" , ", closing=" ] </TOOLCALL>",
    ),
    ToolFormat(
        "granite", ("<|tool_call|> followed by a JSON list",), ("<|tool_call|>", "<tool_call>"),
        Arguments.CALL_OBJECT, opening=" [ ", between=" , ", closing=" ]",
    ),
    ToolFormat(
        "hermes", ("<tool_call>", '"arguments'), ("<tool_call>",), Arguments.CALL_OBJECT,
        closing=" </tool_call>",
    ),
    # A template has either <|tool_call_start|>[ or <|tool_list_start|>[.
    ToolFormat("lfm2", ("<|tool_", "_start|>["), ("<|tool_call_start|>",), Arguments.PYTHON,
               closing=" <|tool_call_end|>"),
    ToolFormat(
        "gemma4", ("<|tool_call>", "<tool_call|>", '<|"|>'), ("<|tool_call>",), Arguments.BARE_KEYS,
        head=(" call:{name} ",), value_end='<|"|>', closing=" <tool_call|>",
    ),
    ToolFormat(
        "functiongemma", ("<start_function_call>", "<escape>"), ("<start_function_call>",),
        Arguments.BARE_KEYS, head=(" call:{name} ",), value_end="<escape>",
        closing=" <end_function_call>",
    ),
    ToolFormat("llama4_pythonic", ("<|python_start|>",), ("<|python_start|>",), Arguments.PYTHON,
               closing=" <|python_end|>"),
    ToolFormat("pythonic", ("[func_name1(",), (), Arguments.PYTHON, first="["),
    ToolFormat(
        "llama3_json", ('"parameters": dictionary of argument name',), ("<|python_tag|>",),
        Arguments.CALL_OBJECT, first="{", between=" ; ",
    ),
)  # fmt: skip
REASONING_FORMATS = (
    ReasoningFormat(
        "openai", "", "<|end|>",
        after="<|start|>assistant<|channel|>final<|message|>", answer="<|channel|>final<|message|>",
    ),
    ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("think", "<think>", "</think>", after="\n\n"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats of thoughts and tool calls in a model's output. None: unknown, or there are none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> frozenset[str]:
        """Texts that must not be lost, even if they are special tokens."""
        found = {"<|message|>"}
        if self.tools is not None:
            texts = (self.tools.opening, *self.tools.head, self.tools.tail, self.tools.closing)
            found.update((*self.tools.marks, *self.tools.begins))
            found.update(marker for text in texts for marker in _MARKER.findall(text))
        if self.reasoning is not None:
            found.update((self.reasoning.begin, self.reasoning.end, *_MARKER.findall(self.reasoning.begin)))
        return frozenset(found - {""})


_MARKER = re.compile(r"<[^<>]+>|\[[A-Z_]+\]")


@functools.lru_cache(maxsize=64)
def formats_of(template: str, tools: str = AUTO, reasoning: str = AUTO) -> OutputFormats:
    """The formats of a model with this chat template, or those that the settings name."""
    return OutputFormats(
        _chosen(tools, TOOL_FORMATS, lambda each: all(mark in template for mark in each.marks)),
        _chosen(reasoning, REASONING_FORMATS, lambda each: each.opening in template),
    )


def _chosen(
    name: str, formats: Iterable[_Format], is_of_template: Callable[[_Format], bool]
) -> _Format | None:
    if name == AUTO:
        return next(filter(is_of_template, formats), None)
    return next((each for each in formats if each.name == name), None)
