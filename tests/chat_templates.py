# ruff: noqa: E501 - templates in use have such lines
"""Chat templates in the style of those in use, and a tokenizer for any text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.v1 import types_pb2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from service.text.chat_template import ChatTemplates

# A namespace that a loop over the reversed list changes; thoughts cut out; JSON.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# What a trainer adds: generation blocks, loop controls, macros, the date, JSON with blanks, a joiner and a cycler.
TRAINED = """{% set sep = joiner('|') %}
{% set shade = cycler('odd', 'even') %}
{% macro turn(role, content) -%}
    <{{ role }}>{{ content | trim }} {{ strftime_now("%Y") }}
{% endmacro %}
{% for i in range(messages | length) %}
    {% if i >= 6 %}{% break %}{% endif %}
    {% set message = messages[i] %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% if message.role == 'tool' %}{{- raise_exception("no tools here: " + message.content) }}{% endif %}
    {{ sep() }}{{ shade.next() }} {{ loop.index }}
    {% if message.role == 'assistant' %}
        {% generation %}
        {% set inner = message.content | upper %}
        {{ inner }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
        {{ turn(message['role'], message.content) }}
        {{ message | tojson(indent=2) }}
        {{ dict(role=message.role, text=message.content) | tojson(ensure_ascii=true, sort_keys=true) }}
        {{ message.content | tojson }} {{ message.get('name', 'nobody') }} {{ missing }}
    {% endif %}
    {{ inner }}
{% endfor %}
{% for key, value in dict(a=1, b=[1, 2.5, none, true]).items() %}{{ key }}={{ value }};{% endfor %}
{{ messages | map(attribute='role') | unique | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
"""

TEMPLATES = {"thoughts": QWEN, "trained": TRAINED}


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, as the base of every byte-level vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def render_chat(
    template: types_pb2.ChatTemplate, messages: Sequence[Mapping[str, Any]], **settings: Any
) -> str:
    """The prompt of some messages, by a process of its own. Raises TemplateError."""

    async def written() -> str:
        templates = ChatTemplates()
        try:
            return await templates.render(template, messages, **settings)
        finally:
            templates.close()

    # In a thread: the caller may run on an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, written()).result()
