"""Train, evaluate and write the second shipped model: a small Qwen3 that tells stories.

What it learns is made from a seed (storyteller_texts.py): stories, questions about them, JSON and tool calls,
as conversations in the ChatML format. Weights are rounded to bfloat16 before anything is measured.

Most of what it has to learn is copying: a story keeps its names, and an answer takes them from the text
before it. What makes that quick (docs/adr/0072): heads begin with copying what they attend to, each name is
one token wherever it stands, each row is a conversation of its own, and names and digits weigh more in the
loss.

    .venv/bin/python .ci/train_storyteller.py                # train and write workers/models/storyteller
    .venv/bin/python .ci/train_storyteller.py --evaluate     # the shipped weights, on other texts

Dimension letters: B rows of a batch; S tokens of its longest row; V the vocabulary.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from storyteller_texts import NAMES, Message, conversation, make_story
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

STORYTELLER = Path(__file__).resolve().parents[1] / "workers" / "models" / "storyteller"
END_TEXT, BEGIN_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tools>", "</tools>", "<tool_response>", "</tool_response>")
VOCAB_SIZE = 1280
MARKS = "|".join(map(re.escape, (END_TEXT, BEGIN_TURN, END_TURN, *TAGS)))
CONTEXT = 2048  # Training sees some 200 tokens at most; the rest is room for longer conversations.
# A word that begins with a capital letter is the same token after a space and without one, so that it can be
# copied; the space before it belongs to what precedes. Other words begin with their space.
PIECES = (
    r"(?:[^\sA-Za-z0-9]| (?=[^\sA-Za-z0-9]))+(?: (?=[A-Z0-9]))?"
    r"| ?[a-z]+(?: (?=[A-Z0-9]))?|[A-Z][a-z]*|[0-9]|\n+|\s+"
)
STEPS, WARM_UP_STEPS, BATCH_TOKENS, SEED = 1050, 50, 2048, 1
MATRIX_RATE, EMBEDDING_RATE, GAIN_RATE = 0.02, 2e-3, 5e-3
COPIED_WEIGHT = 3.0
EVALUATION_SEED = 20_261
# As Qwen's, shortened: a system message with the tools, calls and results in tags.
CHAT_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Call a function as JSON within <tool_call></tool_call>.\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": ' }}{{- call.function.name | tojson }}
            {{- ', "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the texts, with ChatML's tokens."""
    draw = random.Random(SEED)
    template = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE
    )
    texts = [text for _ in range(4000) for text in re.split(MARKS, rendered(template, *conversation(draw)))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, normalized=False, special=True) for text in (END_TEXT, BEGIN_TURN, END_TURN)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TAGS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in TAGS])
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END_TURN, pad_token=END_TEXT, model_max_length=CONTEXT
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build the untrained model."""
    ends: Any = tokenizer.convert_tokens_to_ids([END_TURN, END_TEXT])
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=ends,
        pad_token_id=ends[1],
        # Fused, its backward pass takes a third of a step on a CPU.
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    for layer in model.model.layers:
        # What a head reads of a token is what it writes: with tied embeddings it begins with copying.
        attention, groups = layer.self_attn, config.num_attention_heads // config.num_key_value_heads
        torch.nn.init.orthogonal_(attention.v_proj.weight)
        read = attention.v_proj.weight.detach().view(config.num_key_value_heads, config.head_dim, -1)
        written = read.repeat_interleave(groups, 0).flatten(0, 1)  # [heads * head_dim, hidden]
        attention.o_proj.weight.data.copy_(written.T / groups)
    return model


def rendered(
    tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]], *, asks: bool = False
) -> str:
    """A conversation in the model's format; `asks`: with the beginning of the assistant's next turn."""
    settings = {"tools": tools or None, "tokenize": False, "add_generation_prompt": asks}
    text: str = tokenizer.apply_chat_template(messages, **settings)
    return text


class Rows:
    """Draws rows: a text's tokens, and the weight of each in the loss, 0 for what others write."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        """Rows differ by the seed."""
        self._tokenizer, self._draw = tokenizer, random.Random(seed)
        self._end, self._stop = tokenizer.convert_tokens_to_ids([END_TURN, END_TEXT])
        self._begin = tokenizer.encode(f"{BEGIN_TURN}assistant\n", add_special_tokens=False)
        texts = [text or "" for text in tokenizer.convert_ids_to_tokens(range(VOCAB_SIZE))]
        self._weights = [COPIED_WEIGHT if text[:1].isupper() or text.isdigit() else 1.0 for text in texts]

    def row(self) -> tuple[list[int], list[float]]:
        """A story by itself, so that the model also continues texts, or a conversation."""
        if self._draw.random() < 0.15:
            ids = [*self._tokenizer.encode(make_story(self._draw).text), self._stop]
            return ids, [self._weights[token] for token in ids]
        messages, tools = conversation(self._draw)
        ids = self._tokenizer.encode(rendered(self._tokenizer, messages, tools), add_special_tokens=False)
        turns = assistant_turns(ids, self._begin, self._end)
        return ids, [self._weights[token] if turn else 0.0 for token, turn in zip(ids, turns, strict=True)]

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields ids and weights, each [B, S], of rows of about one length, BATCH_TOKENS with the padding."""
        while True:
            drawn = sorted((self.row() for _ in range(256)), key=lambda row: len(row[0]))
            made, count = [], 0
            while count < len(drawn):
                size = 1
                while count + size < len(drawn) and (size + 1) * len(drawn[count + size][0]) <= BATCH_TOKENS:
                    size += 1
                made.append(drawn[count : count + size])
                count += size
            self._draw.shuffle(made)
            for rows in made:
                longest = len(rows[-1][0])
                ids = torch.tensor([ids + [self._stop] * (longest - len(ids)) for ids, _ in rows])
                yield ids, torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in rows])


def assistant_turns(ids: list[int], begin: list[int], end: int) -> list[bool]:
    """Which tokens the assistant writes: those after `begin`, up to and with `end`."""
    found, speaks = [], False
    for index, token in enumerate(ids):
        speaks = speaks or ids[max(0, index - len(begin)) : index] == begin
        found.append(speaks)
        speaks = speaks and token != end
    return found


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train in place: Muon for the matrices of layers and AdamW for the rest, warm-up, linear decay."""
    embeddings = [model.model.embed_tokens.weight]
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() == 1]
    optimizers: list[tuple[Any, float]] = [
        (torch.optim.Muon(matrices, weight_decay=0.01), MATRIX_RATE),
        (torch.optim.AdamW(embeddings, betas=(0.9, 0.97), weight_decay=0.0), EMBEDDING_RATE),
        (torch.optim.AdamW(gains, betas=(0.9, 0.97), weight_decay=0.0), GAIN_RATE),
    ]
    drawn, seen = Rows(tokenizer, SEED).batches(), 0.0
    for step in range(1, STEPS + 1):
        share = min(1.0, step / WARM_UP_STEPS, 0.02 + 2.5 * (1 - step / STEPS))
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * share
        ids, weights = next(drawn)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state  # [B, S - 1, hidden]
            wanted = weights[:, 1:] > 0
            logits = model.lm_head(hidden[wanted])  # [wanted, V]
        losses = functional.cross_entropy(logits.float(), ids[:, 1:][wanted], reduction="none")
        loss = (losses * weights[:, 1:][wanted]).sum() / weights[:, 1:][wanted].sum()
        for optimizer, _ in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        for optimizer, _ in optimizers:
            optimizer.step()
        seen += loss.item()
        if step % 25 == 0:
            used = f"{time.process_time():.0f} s of CPU"
            print(f"step {step}/{STEPS}  loss {seen / 25:.4f}  {used}", flush=True)
            seen = 0.0


def write(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the model, rounded to bfloat16, and its tokenizer in Hugging Face's layout."""
    model.bfloat16()
    end: Any = tokenizer.convert_tokens_to_ids([END_TURN, END_TEXT])
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=end, pad_token_id=end[1]
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)


def evaluate(directory: Path, count: int) -> None:
    """Print how many answers of each kind are exact, greedily, and how many stories keep their names.

    One forward over the true text decides the first, as for the adder; stories are written.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    draw = random.Random(EVALUATION_SEED)
    right: dict[str, Counter[bool]] = {}
    for _ in range(count):
        messages, tools = conversation(draw)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = messages[index - 1]["content"]
            prompt = rendered(tokenizer, messages[:index], tools, asks=True)
            if " a story about " in asked:
                kind, is_right = "story", keeps_its_names(answer(model, tokenizer, prompt), asked)
            else:
                whole = rendered(tokenizer, messages[: index + 1], tools).rstrip("\n")
                kind, is_right = kind_of(asked), says(model, tokenizer, prompt, whole)
            right.setdefault(kind, Counter())[is_right] += 1
    for kind, found in sorted(right.items()):
        print(f"| {kind} | {found[True]} of {found.total()} |", flush=True)
    for text in ("Tell me a story about a fox named Mia by the sea.", "Tell me a story about Tom the owl."):
        prompt = rendered(tokenizer, [{"role": "user", "content": text}], [], asks=True)
        print(answer(model, tokenizer, prompt))


def keeps_its_names(story: str, asked: str) -> bool:
    """Whether it has two names, the one that was asked for among them, and ends."""
    names, wanted = ({name for name in NAMES if re.search(rf"\b{name}\b", text)} for text in (story, asked))
    return len(names) == 2 and wanted <= names and story.endswith(END_TURN)


def says(model: Any, tokenizer: Any, prompt: str, whole: str) -> bool:
    """Whether the model continues the prompt to the whole text."""
    ids = tokenizer.encode(whole, return_tensors="pt", add_special_tokens=False)
    begin = len(tokenizer.encode(prompt, add_special_tokens=False))
    with torch.inference_mode():
        best = model(ids[:, :-1], use_cache=False).logits.argmax(-1)
    return torch.equal(best[:, begin - 1 :], ids[:, begin:])


def answer(model: Any, tokenizer: Any, prompt: str) -> str:
    """What the model says after a prompt, greedily, with the token that ends it."""
    ids = tokenizer.encode(prompt, return_tensors="pt", add_special_tokens=False)
    made = model.generate(ids, max_new_tokens=200, do_sample=False)[0, ids.shape[1] :]
    text: str = tokenizer.decode(made)
    return text


def kind_of(asked: str) -> str:
    """What a question is an example of."""
    for part, kind in (
        ("Change", "a text with another name"),
        ("Repeat", "a text, or up to 16 names, repeated"),
        ("the story as JSON", "JSON of a story"),
        ("as JSON", "JSON of a sentence"),
        ("{", "what a tool has said"),
        (" in ", "a call of a tool"),
        (" gave ", "extraction"),
        ("Who is the", "question on a story"),
        ("Where does", "question on a story"),
        ("Which colour", "question on a story"),
    ):
        if part in asked:
            return kind
    return "greeting"


def main() -> None:
    """Train and write, unless told only to evaluate; then evaluate what was written."""
    parser = argparse.ArgumentParser(description="Train or evaluate the storyteller.")
    parser.add_argument(
        "--directory", type=Path, default=STORYTELLER, help="where the model is written and read"
    )
    parser.add_argument("--evaluate", action="store_true", help="only evaluate what the directory holds")
    parser.add_argument("--count", type=int, default=400, help="conversations to evaluate")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    if not options.evaluate:
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
        train(model, tokenizer)
        write(model, tokenizer, options.directory)
    evaluate(options.directory, options.count)


if __name__ == "__main__":
    main()
