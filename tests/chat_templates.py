# ruff: noqa: E501 - templates in use have such lines
"""Chat templates in the style of those in use, and a tokenizer for any text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.v1 import types_pb2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from service.text.chat_template import DEFAULT, make_task, new_pool, render

# Headers around each message; the date; a system message that is taken out of the list.
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%Y") %}
    {%- else %}
        {%- set date_string = "2024" %}
    {%- endif %}
{%- endif %}
{#- The system message may be missing. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- else %}
        {{- raise_exception("no tools here: " + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

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

# Roles that must take turns, which `raise_exception` insists on; the system's words before the last question.
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if message.role == "user" or (message.role == "assistant" and message.tool_calls is not defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial system message!") }}
    {%- endif %}
{%- endfor %}
"""

# A macro for each turn; another name for the assistant; parts of contents; blocks and their blank lines.
GEMMA = """{{ bos_token }}
{%- macro turn(role, content, first_user_prefix) -%}
{{ '<start_of_turn>' + role + '\\n' + first_user_prefix }}
    {%- if content is string -%}
{{ content | trim }}
    {%- elif content is iterable -%}
        {%- for item in content -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
{{ raise_exception("Invalid content type") }}
    {%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endmacro -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ turn(role, message['content'], first_user_prefix if loop.first else "") }}
{%- endfor -%}
{% if add_generation_prompt %}
    {{'<start_of_turn>model
'}}
{% endif %}
"""

# What a trainer adds: generation blocks, loop controls, ranges, JSON with blanks, dict, a joiner and a cycler.
TRAINED = """{% set sep = joiner('|') %}
{% set shade = cycler('odd', 'even') %}
{% for i in range(messages | length) %}
    {% if i >= 6 %}{% break %}{% endif %}
    {% set message = messages[i] %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {{ sep() }}{{ shade.next() }} {{ loop.index }}
    {% if message.role == 'assistant' %}
        {% generation %}
        {% set inner = message.content | upper %}
        {{ inner }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
        {{ message | tojson(indent=2) }}
        {{ dict(role=message.role, text=message.content) | tojson(ensure_ascii=true, sort_keys=true) }}
        {{ message.content | tojson }} {{ message.get('name', 'nobody') }} {{ missing }}
    {% endif %}
    {{ inner }}
{% endfor %}
{% for key, value in dict(a=1, b=[1, 2.5, none, true]).items() %}{{ key }}={{ value }};{% endfor %}
{{ messages | map(attribute='role') | unique | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
"""

TEMPLATES = {"llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA, "trained": TRAINED}


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, as the base of every byte-level vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def render_chat(
    template: types_pb2.ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    name: str = DEFAULT,
    **settings: Any,
) -> str:
    """The prompt of some messages, by a process of its own. Raises TemplateError."""
    task = make_task(template, messages, name=name, **settings)

    async def written() -> str:
        pool = new_pool()
        try:
            return await render(pool, template.sources[name], task)
        finally:
            pool.close()

    # In a thread: the caller may run on an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, written()).result()
