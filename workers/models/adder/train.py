"""Train, evaluate and write the model that ships with Quire: a small Qwen3 that adds.

The text is `12+34=46<|endoftext|>`, one token a character, the answer in plain digit order. All pairs of
numbers below 1,000 exist once in a table of a million rows; a seeded 10,000 of them are never trained on.
Weights are rounded to bfloat16 before anything is measured, so that what is measured is what ships.

    python workers/models/adder/train.py                        # train and write this directory
    python workers/models/adder/train.py --evaluate             # the shipped weights on the held-out sums
    python workers/models/adder/train.py --evaluate --all       # ... on all 1,000,000 sums

Dimension letters: B rows of a batch; S = 13, the longest text; V the vocabulary.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).resolve().parent
CHARACTERS = "0123456789+="
END_TEXT, UNKNOWN_TEXT = "<|endoftext|>", "<|unknown|>"
EQUALS_ID, END_ID, UNKNOWN_ID = 11, 12, 13
VOCAB_SIZE = 16  # 14 are used; a power of two is kinder to kernels.
NUMBERS = 1000  # Operands are 0 ... 999.
LONGEST_CONTEXT = 512  # Room to play in; training sees 13 tokens at most.
LONGEST_TEXT = len("999+999=1998") + 1
HELD_OUT_SEED, HELD_OUT_PAIRS = 20_260, 10_000
DIGIT_SHARES = (0.15, 0.25, 0.60)  # How often an operand of one, two, three digits is drawn in training.
EVALUATION_BATCH = 512


@dataclass(frozen=True)
class Sums:
    """Every sum as token ids; row a * 1000 + b is `a+b=`. Read only."""

    ids: torch.Tensor  # [1_000_000, S] int64, filled up with END_ID
    is_answer: torch.Tensor  # [1_000_000, S] bool, the answer's digits and one END_ID
    held_out: torch.Tensor  # [HELD_OUT_PAIRS] int64, rows never trained on, in random order


def build_sums() -> Sums:
    """Build the table of all sums."""
    # The full stop stands for the end; it and what fills up become END_ID.
    texts = [f"{a}+{b}={a + b}.".ljust(LONGEST_TEXT) for a in range(NUMBERS) for b in range(NUMBERS)]
    characters = np.frombuffer("".join(texts).encode(), dtype=np.uint8).reshape(-1, LONGEST_TEXT)
    id_of = np.full(256, END_ID, dtype=np.int64)
    for token_id, character in enumerate(CHARACTERS):
        id_of[ord(character)] = token_id
    ids = torch.from_numpy(id_of[characters])
    after_equals = (ids == EQUALS_ID).cumsum(1).bool() & (ids != EQUALS_ID)
    is_answer = after_equals & torch.from_numpy(characters != ord(" "))
    held_out = np.random.default_rng(HELD_OUT_SEED).choice(NUMBERS**2, HELD_OUT_PAIRS, replace=False)
    return Sums(ids, is_answer, torch.from_numpy(held_out.astype(np.int64)))


def draw_rows(sums: Sums, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield rows of training sums for ever: digit counts by their shares, numbers evenly within them."""
    generator = np.random.default_rng(seed)
    trained_on = np.ones(NUMBERS**2, dtype=bool)
    trained_on[sums.held_out.numpy()] = False
    low, high = np.array([0, 10, 100]), np.array([10, 100, 1000])
    while True:
        digits = generator.choice(3, size=(2, batch_size + batch_size // 8), p=DIGIT_SHARES)
        left, right = generator.integers(low[digits], high[digits])
        rows = left * NUMBERS + right
        yield torch.from_numpy(rows[trained_on[rows]][:batch_size])


def build_model(hidden_size: int, layers: int) -> Qwen3ForCausalLM:
    """Build the untrained model."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        max_position_embeddings=LONGEST_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )
    return Qwen3ForCausalLM(config)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: one token a character, white space dropped, nothing added."""
    vocabulary = {character: token_id for token_id, character in enumerate(CHARACTERS)}
    vocabulary |= {END_TEXT: END_ID, UNKNOWN_TEXT: UNKNOWN_ID}
    # BPE without merges is a character-level model; Fuse joins the characters without spaces.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN_TEXT))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s+"), "")
    tokenizer.decoder = decoders.Fuse()
    special = [AddedToken(text, normalized=False, special=True) for text in (END_TEXT, UNKNOWN_TEXT)]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_TEXT,
        pad_token=END_TEXT,
        unk_token=UNKNOWN_TEXT,
        model_max_length=LONGEST_CONTEXT,
    )


def answers_right(model: nn.Module, sums: Sums, rows: torch.Tensor) -> torch.Tensor:
    """Return for each of the rows whether the greedy answer is right, digits and end: [len(rows)] bool.

    One forward over the true text decides it: greedy decoding gives the true answer exactly when every
    token of the answer is the most likely one after the true tokens before it.
    """
    right = []
    with torch.inference_mode():
        for part in torch.split(rows, EVALUATION_BATCH):
            ids, is_answer = sums.ids[part], sums.is_answer[part]
            best = model(ids[:, :-1], use_cache=False).logits.argmax(-1)  # [B, S - 1]
            right.append(((best == ids[:, 1:]) | ~is_answer[:, 1:]).all(1))
    return torch.cat(right)


def generate(model: nn.Module, prompt_ids: list[int]) -> list[int]:
    """Decode greedily, as a user would: the tokens up to the end, or ten."""
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        for _ in range(10):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
            if ids[0, -1] == END_ID:
                break
    return [int(token_id) for token_id in ids[0, len(prompt_ids) :]]


def train(model: Qwen3ForCausalLM, sums: Sums, options: argparse.Namespace) -> None:
    """Train in place: AdamW, warm-up, cosine decay to zero; the loss is on the answers alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98), fused=True)
    warm_up = min(300, options.steps // 10 + 1)
    started = time.monotonic()
    batches = draw_rows(sums, options.batch, options.seed)
    for step in range(1, options.steps + 1):
        share = 0.5 * (1 + math.cos(math.pi * step / options.steps)) * min(1.0, step / warm_up)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * share
        rows = next(batches)
        ids, is_answer = sums.ids[rows], sums.is_answer[rows]
        logits = model(ids[:, :-1], use_cache=False).logits  # [B, S - 1, V]
        wanted = is_answer[:, 1:]
        loss = functional.cross_entropy(logits[wanted], ids[:, 1:][wanted])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % options.report_every == 0 or step == options.steps:
            right = answers_right(model, sums, sums.held_out[:2000]).float().mean().item()
            seconds = time.monotonic() - started
            progress = f"step {step}/{options.steps}  loss {loss.item():.5f}"
            print(f"{progress}  held-out exact {right:.2%}  {seconds:.0f} s", flush=True)


def write(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write the model, rounded to bfloat16, and its tokenizer in Hugging Face's layout."""
    model.bfloat16()
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=END_ID, pad_token_id=END_ID, max_new_tokens=8
    )
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)


def evaluate(directory: Path, sums: Sums, options: argparse.Namespace) -> None:
    """Print how exact the written model is, computed in float32 and in bfloat16."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    rows = torch.arange(NUMBERS**2) if options.all else sums.held_out[: options.count]
    left, right = rows // NUMBERS, rows % NUMBERS
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        exact = answers_right(model, sums, rows)
        number_exact = int(exact.sum())
        print(f"{dtype}: {number_exact} of {len(rows)} exact ({number_exact / len(rows):.4%})", flush=True)
        for a_digits in (1, 2, 3):
            for b_digits in (1, 2, 3):
                chosen = (digit_count(left) == a_digits) & (digit_count(right) == b_digits)
                print(f"  {a_digits}+{b_digits} digits: {int(exact[chosen].sum())} of {int(chosen.sum())}")
        wrong = [f"{row // NUMBERS}+{row % NUMBERS}" for row in rows[~exact][:20].tolist()]
        print(f"  wrong, the first 20: {wrong}")
        generated = 0
        for row in sums.held_out[: options.generate].tolist():
            a, b = divmod(row, NUMBERS)
            ids = generate(model, tokenizer.encode(f"{a}+{b}=").ids)
            generated += ids[-1] == END_ID and tokenizer.decode(ids) == str(a + b)
        print(f"  generated token by token: {generated} of {options.generate} exact", flush=True)


def digit_count(numbers: torch.Tensor) -> torch.Tensor:
    """Return how many digits each number below 1,000 is written with."""
    return 1 + (numbers >= 10).long() + (numbers >= 100).long()


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train or evaluate the adder.")
    parser.add_argument("--directory", type=Path, default=HERE, help="where the model is written and read")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate what the directory holds")
    parser.add_argument("--all", action="store_true", help="evaluate on all 1,000,000 sums")
    parser.add_argument("--count", type=int, default=HELD_OUT_PAIRS, help="held-out sums to evaluate on")
    parser.add_argument("--generate", type=int, default=200, help="held-out sums to generate token by token")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--hidden-size", type=int, default=64, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report-every", type=int, default=200, help="steps between lines of progress")
    return parser.parse_args()


def main() -> None:
    """Train and write, unless told only to evaluate; then evaluate what was written."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    sums = build_sums()
    if not options.evaluate:
        model = build_model(options.hidden_size, options.layers)
        print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
        train(model, sums, options)
        write(model, options.directory)
    evaluate(options.directory, sums, options)


if __name__ == "__main__":
    main()
