"""Tiny models that have learnt by heart to call tools, in the forms of three families."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.model_factory import TinyModel, hf_config

_STEPS, _WARM_UP_STEPS, _RATE = 90, 10, 4e-3
# The loss of a token that has at least 9 tenths of the probability.
_LEARNT = 0.1
_MERGED = 500
CITIES = ["Bern", "Rome", "Oslo"]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "enum": [1, 2, 3]}},
                "required": ["city", "days"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "stop",
            "description": "Ends",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How a family writes.

    Attributes:
        special: Its special tokens, the end of an answer first.
        plain: Further tokens.
        has_content: Whether a text may come before calls.
        has_thoughts: Whether it thinks.
    """

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    has_content: bool = True
    has_thoughts: bool = False


_HERMES = r"""{%- if tools %}{{- '<|im_start|>system\nCall within <tool_call></tool_call>.' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}
    {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}
    {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
    {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
_LLAMA = r"""{{- '<|begin_of_text|>' }}{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{{- 'Answer with {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- for call in message.tool_calls or [] %}{%- if not loop.first %}{{- '; ' }}{%- endif %}
    {{- '{"name": "' + call.function.name + '", "parameters": ' }}
    {{- call.function.arguments | tojson }}{{- '}' }}
{%- else %}{{- message.content }}{%- endfor %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
_MISTRAL = r"""{{- '<s>' }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}
    {%- if message.reasoning_content %}{{- '[THINK]' + message.reasoning_content + '[/THINK]' }}{%- endif %}
    {%- if message.content %}{{- message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}{{- call.function.arguments | tojson }}
    {%- endfor %}{{- '</s>' }}
{%- endif %}{%- endfor %}"""
FAMILIES = {
    "hermes": Family(
        _HERMES,
        ("<|im_end|>", "<|im_start|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
        has_thoughts=True,
    ),
    "llama": Family(
        _LLAMA,
        ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        has_content=False,
    ),
    "mistral": Family(
        _MISTRAL,
        (
            "</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]",
        ),
        has_thoughts=True,
    ),
}  # fmt: skip


def _weather(city: str, days: int) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": city, "days": days}}
    return {"id": f"call0000{days}", "type": "function", "function": function}


def conversations(family: Family) -> dict[str, list[dict[str, Any]]]:
    """What it learns, by what the last answer is: one call, several, none, or what a tool has said."""

    def answer(content: str, calls: list[dict[str, Any]], thoughts: str = "") -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content if family.has_content else "", "tool_calls": calls}
        if thoughts and family.has_thoughts:
            message["reasoning_content"] = thoughts
        return message

    one = [
        {"role": "user", "content": "How is the weather in Bern?"},
        answer("Let me look.", [_weather("Bern", 1)], "They want Bern."),
    ]
    two = [
        {"role": "user", "content": "And in Rome and Oslo?"},
        answer("", [_weather("Rome", 2), _weather("Oslo", 3)]),
    ]
    said = [
        *one,
        {"role": "tool", "content": '{"weather": "sunny"}', "tool_call_id": "call00001"},
        answer("It is sunny.", []),
    ]
    return {
        "one": one,
        "two": two,
        "said": said,
        "none": [{"role": "user", "content": "Hello!"}, answer("Hello!", [])],
    }


def train(family: Family, directory: Path) -> Path:
    """Writes a model that answers these conversations, greedily. The same each time, but for rounding."""
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.BPE()), chat_template=family.template
    )
    pairs = [_rendered(tokenizer, messages) for messages in conversations(family).values()]
    tokenizer = _tokenizer(family, ["".join(pair) for pair in pairs])
    rows = [[tokenizer.encode(text, add_special_tokens=False) for text in pair] for pair in pairs]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, wanted = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for index, (prompt, answer) in enumerate(rows):
        both = torch.tensor([*prompt, *answer])
        ids[index, : len(both)] = both
        wanted[index, len(prompt) : len(both)] = both[len(prompt) :]
    torch.manual_seed(1)
    spec = TinyModel(vocab_size=len(tokenizer), max_positions=1024, tied=True)
    model = AutoModelForCausalLM.from_config(hf_config(spec))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.97), weight_decay=0.0)
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _WARM_UP_STEPS)
        logits = model(ids[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten(), reduction="none")
        if losses.max() < _LEARNT:
            break
        optimizer.zero_grad()
        torch.autograd.backward(losses.sum() / (wanted[:, 1:] >= 0).sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        raise AssertionError("it has not learnt them")
    end = tokenizer.convert_tokens_to_ids(family.special[0])
    model.generation_config.eos_token_id = end
    model.config.eos_token_id = end
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """The prompt of the last answer, and that answer."""
    prompt, whole = (
        tokenizer.apply_chat_template(each, tools=TOOLS, tokenize=False, add_generation_prompt=asks)
        for each, asks in ((messages[:-1], True), (messages, False))
    )
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :].rstrip("\n")


def _tokenizer(family: Family, texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MERGED,
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in family.special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in family.plain])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=family.special[0])  # type: ignore[no-untyped-call]
    made.chat_template = family.template
    return made
