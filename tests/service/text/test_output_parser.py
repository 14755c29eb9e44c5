"""What models write, as content, thoughts and tool calls: by family, in any pieces, and malformed."""

# ruff: noqa: RUF001 - DeepSeek's markers have a wide bar.

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.setting_rules import REASONING_PARSERS, TOOL_CALL_PARSERS
from service.text.call_values import MAX_CALLS, typed_value
from service.text.json_scanner import MAX_LEVELS, JsonScanner, MalformedJson
from service.text.output_formats import (
    FORCED,
    REASONING_FORMATS,
    TOOL_FORMATS,
    OutputFormats,
    ToolFormat,
    formats_of,
)
from service.text.output_parser import OutputParser, Part
from tests.conversations import FUNCTIONARY

TOOLS: dict[str, dict[str, Any]] = {
    "look_up": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "stop": {"properties": {}},
}
BY_NAME = {each.name: each for each in (*TOOL_FORMATS, FORCED)}
THOUGHTS = {each.name: each for each in REASONING_FORMATS}
# Two calls as each family writes them: look_up with two arguments, and stop with none.
ARGUMENTS = '{"city": "Bern <b>", "days": 3}'
OBJECTS = ('{"name": "look_up", "arguments": ' + ARGUMENTS + "}", '{"name": "stop", "arguments": {}}')
WRITTEN = {
    "openai": "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>" + ARGUMENTS
    + "<|call|><|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{}<|call|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.stop:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n"
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{ARGUMENTS}"
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look_up">\n<｜DSML｜parameter '
    'name="city" string="true">Bern <b></｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3'
    '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look_up">\n<parameter name="city">Bern <b></parameter>'
    '\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="stop">\n</invoke>'
    "\n</minimax:tool_call>",
    "mistral": f"[TOOL_CALLS]look_up[ARGS]{ARGUMENTS}[TOOL_CALLS]stop[CALL_ID]a1B2c3D4e[ARGS]{{}}",
    "mistral_list": f"[TOOL_CALLS] [{', '.join(OBJECTS)}]",
    "glm45": "<tool_call>look_up\n<arg_key>city</arg_key>\n<arg_value>Bern <b></arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>stop\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=look_up>\n<parameter=city>Bern <b></parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=stop>\n</function>\n</seed:tool_call>",
    "functionary": f"<function=look_up>{ARGUMENTS}</function><function=stop>{{}}</function>",
    "qwen3_coder": "<tool_call>\n<function=look_up>\n<parameter=city>\nBern <b>\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n"
    "</tool_call>",
    "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in OBJECTS),
    "hunyuan_a13b": f"<tool_calls>[{', '.join(OBJECTS)}]</tool_calls>",
    "nemotron_json": f"<TOOLCALL>[{', '.join(OBJECTS)}]</TOOLCALL>",
    "granite": f"<|tool_call|>[{', '.join(OBJECTS)}]",
    "lfm2": '<|tool_call_start|>[look_up(city="Bern <b>", days=3), stop()]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:look_up{city:<|"|>Bern <b><|"|>,days:3}<tool_call|>'
    "<|tool_call>call:stop{}<tool_call|>",
    "functiongemma": "<start_function_call>call:look_up{city:<escape>Bern <b><escape>,days:3}"
    "<end_function_call><start_function_call>call:stop{}<end_function_call>",
    "llama4_pythonic": '<|python_start|>[look_up(city="Bern <b>", days=3), stop()]<|python_end|>',
    "pythonic": '[look_up(city="Bern <b>", days=3), stop()]',
    "llama3_json": "; ".join(OBJECTS).replace("arguments", "parameters"),
    "forced": f"[{', '.join(OBJECTS)}]",
}  # fmt: skip


def parts_of(
    form: ToolFormat, pieces: Sequence[str], reasoning: str = "think", **settings: Any
) -> list[Part]:
    parser = OutputParser(OutputFormats(form, THOUGHTS.get(reasoning)), TOOLS, **settings)
    return [*itertools.chain.from_iterable(map(parser.push, pieces)), *parser.end()]


def gathered(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, thoughts and calls, where the text of a broken call is content."""
    content = thoughts = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        content += part.content + part.broken
        thoughts += part.thoughts
        if part.begun:
            calls.append((part.begun[1], ""))
        if part.arguments:
            calls[-1] = calls[-1][0], calls[-1][1] + part.arguments
        if part.broken:
            calls.pop()
    return content, thoughts, calls


def valued(calls: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def test_values_of_bare_keys() -> None:
    """As Gemma 4 writes them: brackets and quotes in texts, texts as keys, and thoughts before."""
    text = (
        '<|channel>thought\nHm.\n<channel|><|tool_call>call:look_up{list:[1,-2.5,<|"|>a}]<|"|>,[]],nested:'
        '{<|"|>x y<|"|>:true,b:null},say:<|"|>"{a:1}", \n<|"|>,none:<|"|><|"|>}<tool_call|>'
    )
    for pieces in (list(text), [text]):
        content, thoughts, calls = gathered(parts_of(BY_NAME["gemma4"], pieces, "gemma4"))
        (call,) = valued(calls)
        values = {"list": [1, -2.5, "a}]", []], "nested": {"x y": True, "b": None}}
        assert call == ("look_up", {**values, "say": '"{a:1}", \n', "none": ""})
        assert (content, thoughts) == ("", "Hm.")
    for wrong in ("{a:Bern}", "{a:1", '{a:<|"|>b}', "[1]", "{a:1}}"):
        content, _, calls = gathered(parts_of(BY_NAME["gemma4"], f"<|tool_call>call:look_up{wrong} x"))
        assert bool(calls) == (wrong == "{a:1}}") and content.endswith(" x")


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("is_thinking", [False, True])
def test_calls_of_each_family(name: str, is_thinking: bool) -> None:
    text, reasoning = WRITTEN[name], "openai" if name == "openai" else "think"
    if is_thinking and name == "openai":
        text = f"<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant{text}"
    elif is_thinking:
        text = f"<think>\nHm.\n</think>\n\n{text}"
    # In pieces of one character.
    content, thoughts, calls = gathered(parts_of(BY_NAME[name], text, reasoning))
    assert valued(calls) == [("look_up", {"city": "Bern <b>", "days": 3}), ("stop", {})]
    assert (content, thoughts) == ("", "Hm." if is_thinking else "")


def test_settings_name_the_formats() -> None:
    assert TOOL_CALL_PARSERS[2:] == tuple(form.name for form in TOOL_FORMATS)
    assert REASONING_PARSERS[2:] == tuple(form.name for form in REASONING_FORMATS)


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=[each.name for each in TOOL_FORMATS])
def test_a_template_shows_the_format(form: ToolFormat) -> None:
    template = "{# tools #} <think> " + " ".join((*form.marks, *form.begins))
    if form.name == "openai":
        template += THOUGHTS["openai"].opening
    assert formats_of(template).tools is form
    assert formats_of(template, "none", "none") == OutputFormats()
    assert formats_of("", form.name).tools is form
    thoughts = formats_of(template).reasoning
    assert thoughts is not None and thoughts.name == ("openai" if form.name == "openai" else "think")


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("granite", "respond only with <|tool_call|> followed by a JSON list of tools used."),
        ("nemotron_json", """{{- '<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}, ' -}}"""),
        (
            "hunyuan_a13b",
            r"within <tool_call></tool_call> XML tags: <tool_calls>[{\"name\": ..., \"arguments\": ",
        ),
        ("lfm2", """{{- "List of tools: <|tool_list_start|>[" }} "<|tool_response_start|>" """),
        ("lfm2", """{{- "<|tool_call_start|>[" + (calls | join(", ")) + "]<|tool_call_end|>" -}}"""),
        ("deepseek_v32", """set dsml_token = "｜DSML｜" -%}<{{ dsml_token }}function_calls>"""),
        ("functionary", '<function=example_function_name>{"example_name": "example_value"}</function>'),
        ("qwen3_coder", "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>"),
        ("hermes", r"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}"),
        # Forms that this server cannot read: of MiniMax M3, of Gemma 4, of Functionary 3.2 and of others.
        ("", """{% set ns = ']<]minimax[>[' %}{{ ns ~ '<tool_call>' }}{{ call.arguments }}"""),
        (
            "",
            """'<|tool_call>call:' + name + '{' ... '<tool_call|>' '<|channel>thought' '<|tool_response>'""",
        ),
        ("", """'>>>' + call.name + call.arguments"""),
        ("", FUNCTIONARY),
    ],
)
def test_a_format_is_known_by_how_its_templates_write_it(name: str, template: str) -> None:
    assert formats_of("{{ tools }}" + template).tools is BY_NAME.get(name)


@pytest.mark.parametrize(("is_text", "value"), [("true", "12"), ("false", 12)])
def test_a_call_may_say_that_a_value_is_a_text(is_text: str, value: Any) -> None:
    text = WRITTEN["deepseek_v32"].replace('"true">Bern <b>', f'"{is_text}">12')
    parser = OutputParser(OutputFormats(BY_NAME["deepseek_v32"]), {"look_up": {}})
    _, _, calls = gathered([*parser.push(text), *parser.end()])
    assert json.loads(calls[0][1])["city"] == value


def test_thoughts_that_the_prompt_has_begun() -> None:
    parts = parts_of(BY_NAME["hermes"], ["\nSo <tool", "_call>?\n</th", "ink>\n\nYes. \n"], is_thinking=True)
    assert gathered(parts) == ("Yes. \n", "So <tool_call>?", [])
    assert gathered(parts_of(BY_NAME["hermes"], ["Wait"], is_thinking=True)) == ("", "Wait", [])


def test_arguments_are_sent_while_they_are_written() -> None:
    parser = OutputParser(OutputFormats(BY_NAME["hermes"], None), TOOLS)
    assert parser.push('Sure.\n<tool_call>\n{"name": "look_up", ') == [Part(content="Sure.")]
    begun, arguments = parser.push('"arguments": {"city": "Be')
    assert begun.begun is not None and begun.begun[1] == "look_up" and begun.begun[0].startswith("call_")
    assert arguments == Part(arguments='{"city": "Be')
    assert parser.push('rn"}}\n</tool_call>\n') == [Part(arguments='rn"}')]
    assert parser.end() == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call> none"),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "stop", "arguments": [}'),
        ("hermes", '<tool_call>{"name": "stop", "arguments": {"a": 01}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "stop", "arguments": {"a": "b'),
        ("hermes", '<tool_call>{"name": "stop", "arguments": ' + '{"a":' * MAX_LEVELS),
        ("mistral", "[TOOL_CALLS]stop[ARGS]none"),
        ("mistral_list", "[TOOL_CALLS] [1]"),
        ("llama3_json", '{"name": "Ada", "parameters": {}}'),
        ("llama3_json", '{"answer": 42}'),
        ("pythonic", "[link](https://example.org)"),
        ("pythonic", "[other()]"),
        ("pythonic", "[stop(1)]"),
        ("llama4_pythonic", "<|python_start|>[stop(a=open('x'))]"),
        ("glm45", "<tool_call>what is it?</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=look_up>\n<parameter=city>\nBern"),
        ("kimi_k2", "<|tool_calls_section_begin|>none"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>none"),
        # Each marker begins a section up to the end. Took minutes when all were read again.
        ("llama4_pythonic", "<|python_start|>[\\'" * 8000),
        ("hermes", '<tool_call>{"arguments": {"a": 1e999}, "name": "stop"}</tool_call>'),
    ],
)  # fmt: skip
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert gathered(parts_of(BY_NAME[name], [text])) == (text, "", [])


def test_a_number_beyond_the_largest_is_a_text() -> None:
    text = WRITTEN["glm45"].replace(">3<", ">1e999<")
    _, _, calls = gathered(parts_of(BY_NAME["glm45"], [text]))
    assert json.loads(calls[0][1])["days"] == "1e999"


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": ["string", "null"]}, "01234", "01234"),
        ({"type": ["string", "null"]}, "12345", "12345"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"a"', '"a"'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "3", 3),
        ({"oneOf": [{"type": ["string"]}, {"type": "array"}]}, "[1]", [1]),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "True\n", True),
        ({"type": "string"}, "True", "True"),
        ({"type": "string"}, "None\n ", "None\n "),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": [3, {}], "anyOf": 3}, "false", False),
        ({"type": "array"}, "[1, 'a', None, True]", [1, "a", None, True]),
        ({"type": ["object", "string"]}, "{'a': [1]}", {"a": [1]}),
        ({"type": "array"}, "[1, f()]", "[1, f()]"),
        ({"type": "array"}, "[1e999]", "[1e999]"),
        ({"type": "string"}, "['a']", "['a']"),
        ({}, "12", 12),
    ],
)
@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
def test_a_value_has_the_type_that_its_schema_names(
    name: str, declared: dict[str, Any], text: str, value: Any
) -> None:
    tools = {"look_up": {"properties": {"city": declared}}}
    parser = OutputParser(OutputFormats(BY_NAME[name]), tools)
    written = WRITTEN[name].replace("Bern <b>", text)
    _, _, calls = gathered([*parser.push(written), *parser.end()])
    found = json.loads(calls[0][1])["city"]
    assert (found, type(found)) == (value, type(value))


ARRAY = {"properties": {"key": {"type": "array"}}}


def test_a_list_of_python_may_have_long_texts() -> None:
    code = """if a == 'b': c["d"] = '''e'''  # f\n\t""" * 600
    assert json.loads(typed_value(repr([code, "it's"]), ARRAY, "key")) == [code, "it's"]


@pytest.mark.parametrize(
    "text",
    [
        "[" + "1," * 20_000 + "]",
        "[" + "'a'" * 15_000 + "]",
        "[f'" + "{1}" * 15_000 + "']",
        '["""a"b""",' + "1," * 20_000 + '"c"]',
        '[#"\n' + "1," * 20_000 + '"c"]',
        '[f" ",' + "1," * 20_000 + '" "]',
    ],
    ids=["numbers", "strings", "formatted", "quoted thrice", "comment", "behind a formatted one"],
)
def test_what_keeps_the_parser_of_python_busy_stays_a_text(text: str) -> None:
    assert typed_value(text, ARRAY, "key") == json.dumps(text)
    called = f"<|python_start|>[stop(a={text})]<|python_end|>"
    assert gathered(parts_of(BY_NAME["llama4_pythonic"], [called])) == (called, "", [])


@pytest.mark.parametrize(
    "arguments", ["", ', "arguments": null', ', "arguments": ""', ', "parameters": {}', ', "arguments": "{}"']
)
def test_a_call_without_arguments(arguments: str) -> None:
    text = f'<tool_call>{{"name": "look_up"{arguments}}}</tool_call>'
    content, _, calls = gathered(parts_of(BY_NAME["hermes"], [text]))
    assert (content, calls) == ("", [("look_up", "{}")])


def test_many_dropped_texts() -> None:
    """They are no part of an answer, wherever they are; what only begins like one is."""
    dropped = [f"<SPECIAL_{number}>" for number in range(1000)]
    text = "".join(f"<p>{each}</p><SPECIAL_" for each in dropped)
    content, _, _ = gathered(parts_of(BY_NAME["mistral"], [text], dropped=dropped))
    assert content == "<p></p><SPECIAL_" * 1000


def test_gpt_oss_may_call_at_once() -> None:
    """Its prompt ends with <|start|>assistant."""
    text = ' to=functions.look_up<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>'
    content, _, calls = gathered(parts_of(BY_NAME["openai"], text, "openai"))
    assert (content, valued(calls)) == ("", [("look_up", {"city": "Bern"})])
    parser = OutputParser(OutputFormats(BY_NAME["openai"]), TOOLS)
    assert parser.push("to be") == [Part(content="to be")], "an answer is not held back"


def test_qwen3_coder_may_leave_out_the_first_marker() -> None:
    text = "Let me see.\n" + WRITTEN["qwen3_coder"].replace("<tool_call>\n", "")
    content, _, calls = gathered(parts_of(BY_NAME["qwen3_coder"], text))
    assert content == "Let me see."
    assert valued(calls) == [("look_up", {"city": "Bern <b>", "days": 3}), ("stop", {})]
    text = "Write <function=name>:<function=look_up>\n<parameter=city>\nBern"
    assert gathered(parts_of(BY_NAME["qwen3_coder"], text)) == (text, "", [])


@pytest.mark.parametrize("name", ["glm45", "seed_oss", "qwen3_coder"])
@pytest.mark.parametrize("value", ["a\n", "a\n\n", "\ta ", ""])
def test_a_text_keeps_its_whitespace(name: str, value: str) -> None:
    _, _, calls = gathered(parts_of(BY_NAME[name], [WRITTEN[name].replace("Bern <b>", value)]))
    assert json.loads(calls[0][1])["city"] == value


def test_a_malformed_call_keeps_the_spaces_around_it() -> None:
    text = "Look: \n" + WRITTEN["qwen3_coder"].replace("Bern <b>", "</parameter> x") + "\n end"
    content, _, calls = gathered(parts_of(BY_NAME["qwen3_coder"], text))
    assert [name for name, _ in calls] == ["stop"]
    assert content == text[: text.index("\n<tool_call>\n<function=stop>")] + "end"


def test_calls_after_a_malformed_one_are_found() -> None:
    text = '<tool_call>{"name": "stop", "arguments": {1}} ' + WRITTEN["hermes"]
    content, _, calls = gathered(parts_of(BY_NAME["hermes"], [text]))
    assert content == '<tool_call>{"name": "stop", "arguments": {1}}'
    assert [name for name, _ in calls] == ["look_up", "stop"]


def test_there_are_limits() -> None:
    form = BY_NAME["hermes"]
    content, _, calls = gathered(parts_of(form, [WRITTEN["hermes"] * MAX_CALLS]))
    assert len(calls) == MAX_CALLS and content.count("<tool_call>") == MAX_CALLS
    lists = "<|python_start|>[" + ", ".join(["stop()"] * 100) + "]<|python_end|>"
    content, _, calls = gathered(parts_of(BY_NAME["llama4_pythonic"], [lists, lists]))
    assert len(calls) == 100 and content == lists
    _, _, calls = gathered(parts_of(form, [WRITTEN["hermes"]], max_calls=1))
    assert [name for name, _ in calls] == ["look_up"]


def without_ids(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """The kinds of the parts and their texts, with neighbours of one kind as one, and calls without ids."""
    found: list[tuple[str, str]] = []
    for part in parts:
        if part.begun:
            found.append(("begun", part.begun[1]))
        for kind in ("content", "thoughts", "arguments", "broken"):
            if text := getattr(part, kind):
                before = found.pop()[1] if found and found[-1][0] == kind else ""
                found.append((kind, before + text))
    return found


FRAGMENTS = [
    "<think>", "</think>", " ", "\n", "a", "{", "}", "[", "]", '"', "\\", ",", ":", "1", "stop", "(", ")",
    '{"name": "stop", "arguments": {', '"a": [1, {"b": "\\u00e9"}]', "}}", "assistant", "analysis",
    "<|message|>", "<|end|>", "<|start|>", "<|channel|>",
    *{form.begins[0] for form in BY_NAME.values() if form.begins},
    *{text for form in BY_NAME.values() for text in (form.closing, form.tail, form.value_end, form.key)},
    *WRITTEN.values(),
    *(text[: len(text) // 2] for text in WRITTEN.values()),
]  # fmt: skip


@given(
    st.sampled_from(sorted(BY_NAME)),
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12).map("".join),
    st.data(),
)
def test_any_cut_gives_the_same_parts(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
    reasoning = "openai" if name == "openai" else "think"
    settings = {"is_thinking": data.draw(st.booleans())}
    whole, cut = (parts_of(BY_NAME[name], each, reasoning, **settings) for each in ([text], pieces))
    assert without_ids(whole) == without_ids(cut)
    content, thoughts, calls = gathered(whole)
    assert all(isinstance(arguments, dict) for _, arguments in valued(calls)), "complete calls are valid"
    # Nothing is invented, and without markers nothing is lost.
    if "<" not in text and not calls:
        assert (thoughts or content).strip(" \t\r\n") == text.strip(" \t\r\n")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON).map(json.dumps), st.data())
@example('{"a": 1}', None)
def test_the_scanner_knows_json(text: str, data: st.DataObject | None) -> None:
    """It takes each object, and of one with a mistake only what Python's parser takes."""
    if data is not None:
        at, char = data.draw(st.integers(0, len(text) - 1)), data.draw(st.sampled_from(' {}[]",:\\1e.-tu\n'))
        text = data.draw(
            st.sampled_from([text, text[:at] + char + text[at + 1 :], text[:at] + char + text[at:]])
        )
    scanner = JsonScanner()
    try:
        for char in text:
            scanner.feed(char)
        is_valid = scanner.is_complete
    except MalformedJson:
        is_valid = False
    try:
        expected = isinstance(json.loads(text.rstrip()), dict) and text == text.rstrip()
    except ValueError:
        expected = False
    assert is_valid == expected


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("hermes", '<tool_call>{"x": "' + "a" * 60_000, '"}</tool_call>'),
        ("hermes", '<tool_call>{"x": "' + '<tool_call>{\\"' * 4_000, '"}</tool_call>'),
        ("llama4_pythonic", "<|python_start|>[stop(a=[" + "1," * 20_000, "])]"),
        ("pythonic", "[" + "stop(), " * 7_000, "stop()]"),
        ("hermes", "<tool_call>" + " " * 60_000, "x"),
    ],
)
def test_the_end_of_a_long_section_takes_few_steps(name: str, begin: str, end: str) -> None:
    """Nothing else runs meanwhile. 36,000 characters took a second, since all of them were read again."""
    parser = OutputParser(OutputFormats(BY_NAME[name], None), TOOLS)
    parts, steps = parser.push(begin), 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal steps
        steps += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        parts += parser.push(end)
    finally:
        sys.setprofile(None)
    parts += parser.end()
    assert gathered(parts) == (begin + end, "", [])
    assert steps < 10_000
