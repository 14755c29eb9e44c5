# ruff: noqa: E501 - templates in use have such lines
"""Chat templates that write tool calls, names and thoughts as those of well-known models do, each in its way."""

from __future__ import annotations

# Of DeepSeek's models: a content that is none means tool calls, whose arguments are appended to text.
DEEPSEEK = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<User>' + message['content'] }}
{%- elif message['role'] == 'assistant' and message['content'] is none %}
{%- for call in message['tool_calls'] %}
{{- '<calls><call>' + call['type'] + '<sep>' + call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```<end>' }}
{%- endfor %}{{ '<end of calls>' }}
{%- elif message['role'] == 'assistant' %}{{ '<Assistant>' + message['content'].split('</think>')[-1] + eos_token }}
{%- elif message['role'] == 'tool' %}{{ '<output>' + message['content'] + '<end of output>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<Assistant>' }}{% endif %}"""

# Of Gemma: the answer to a call has the name of its function; everything else alternates.
GEMMA = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('System role not supported here') }}{% endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' }}
{%- if message.role == 'tool' %}{{ 'response:' + message['name'] + '{' + message.content | trim + '}' }}
{%- elif message.tool_calls is defined and message.tool_calls %}
{%- for call in message.tool_calls %}call:{{ call.function.name }}{ {%- for key, value in call.function.arguments | dictsort %}{{ key }}:{{ value | tojson }}{% endfor -%} }{% endfor %}
{%- else %}{{ message.content | trim }}{% endif %}
{{- '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# Of functionary: names, a content that is not none, and arguments that are appended to text.
FUNCTIONARY = """{% for message in messages %}{% if message['role'] == 'tool' %}
{{- '<|header|>tool\\n\\nname=' + message['name'] + '\\n' + message['content'] + '<|eot|>' }}
{%- elif message['role'] == 'assistant' %}{{ '<|header|>assistant\\n\\n' }}
{%- if message['content'] is not none %}{{ message['content'] }}{% endif %}
{%- if 'tool_calls' in message and message['tool_calls'] is not none %}
{%- for call in message['tool_calls'] %}{{ '<function=' + call['function']['name'] + '>' + call['function']['arguments'] + '</function>' }}{% endfor %}
{%- endif %}{{ '<|eot|>' }}
{%- else %}{{ '<|header|>' + message['role'] }}{% if message['name'] is defined %}{{ ' name=' + message['name'] }}{% endif %}{{ '\\n\\n' + message['content'] + '<|eot|>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|header|>assistant\\n\\n' }}{% endif %}"""

# Of Kimi: a name instead of the role; arguments in both forms; ids of calls.
KIMI = """{% macro content_of(message) %}{% set c = message.get('content') %}{% if c is string %}{{ c }}{% elif c is not none %}{% for part in c %}{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}
{%- if tools %}<|system|>tool_declare<|middle|>{{ tools | tojson(separators=(',', ':')) }}<|end|>{% endif %}
{%- for message in messages %}{% set name = message.get('name') or message['role'] %}
{{- '<|' + message['role'] + '|>' + name + '<|middle|>' }}
{%- if message['role'] == 'assistant' and message.get('tool_calls') %}{{ content_of(message) }}<|calls|>
{%- for call in message['tool_calls'] %}<|call|>{{ call['id'] }}<|args|>{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}<|/call|>{% endfor %}<|/calls|>
{%- elif message['role'] == 'tool' %}## Return of {{ message.tool_call_id }}
{{ content_of(message) }}{% else %}{{ content_of(message) }}{% endif %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>assistant<|middle|>{% endif %}"""

# Of Qwen: thoughts of their own or in the content; results as a user's turn.
QWEN = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
{%- if message.role == 'assistant' %}
{%- set thoughts = '' %}{%- if message.reasoning_content is string %}{%- set thoughts = message.reasoning_content %}{%- elif '</think>' in content %}{%- set thoughts = content.split('</think>')[0] %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<|im_start|>assistant\\n<think>' + thoughts + '</think>' + content }}
{%- if message.tool_calls %}{%- for call in message.tool_calls %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<tool_call>{"name": "' + call.name + '", "arguments": ' }}{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}{{- '}</tool_call>' }}
{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>' + content + '</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Of Llama 3: asks whether a message has calls or content at all, and writes one call only.
LLAMA = """{{- bos_token }}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' or message.role == 'ipython' %}{{- '<|header|>ipython\\n\\n' }}{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- '<|eot|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
{{- '<|header|>assistant\\n\\n' }}{%- if 'content' in message %}{{- '[content ' ~ message.content ~ ']' }}{%- endif %}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}{{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot|>' }}
{%- else %}{{- '<|header|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|eot|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|header|>assistant\\n\\n' }}{%- endif %}"""

# Of Mistral: users and assistants alternate, ids have nine characters, and a whole function is written as JSON.
MISTRAL = """{{- bos_token }}{%- set ns = namespace(last='') %}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- if ns.last == 'user' %}{{- raise_exception('Conversation roles must alternate') }}{%- endif %}{{- '[INST] ' + message['content'] + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] }}
{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- ', "id": "' + call.id + '"}' }}{%- endfor %}{{- ']' + eos_token }}
{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}
{%- elif message['role'] == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{%- set ns.last = message['role'] %}{%- endfor %}"""

# Writes each key of a message.
EXACT = "{% for message in messages %}{{ message | tojson(sort_keys=true) }}\n{% endfor %}"

TEMPLATES = {
    "deepseek": DEEPSEEK,
    "gemma": GEMMA,
    "functionary": FUNCTIONARY,
    "kimi": KIMI,
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "exact": EXACT,
}
