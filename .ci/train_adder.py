"""Train, evaluate and write the model that ships with Quire: a small Qwen3 that adds.

The text is `12+34=46<|endoftext|>`, one token a character, the answer in plain digit order. All pairs of
numbers below 1,000 exist once in a table of a million rows; a seeded 10,000 of them are never trained on.
Weights are rounded to bfloat16 before anything is measured, so that what is measured is what ships.

    .venv/bin/python .ci/train_adder.py                # train and write workers/models/adder
    .venv/bin/python .ci/train_adder.py --evaluate     # the shipped weights on the held-out sums

Dimension letters: B rows of a batch; S = 13, the longest text; V the vocabulary.
"""

from __future__ import annotations

import argparse
import math
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

ADDER = Path(__file__).resolve().parents[1] / "workers" / "models" / "adder"
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
STEPS, WARM_UP_STEPS, BATCH_SIZE, LEARNING_RATE, SEED = 6000, 300, 256, 3e-3, 1


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


def build_model() -> Qwen3ForCausalLM:
    """Build the untrained model."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
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


def train(model: Qwen3ForCausalLM, sums: Sums) -> None:
    """Train in place: AdamW, warm-up, cosine decay to zero; the loss is on the answers alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    batches = draw_rows(sums, BATCH_SIZE, SEED)
    for step in range(1, STEPS + 1):
        share = 0.5 * (1 + math.cos(math.pi * step / STEPS)) * min(1.0, step / WARM_UP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * share
        rows = next(batches)
        ids, is_answer = sums.ids[rows], sums.is_answer[rows]
        logits = model(ids[:, :-1], use_cache=False).logits  # [B, S - 1, V]
        wanted = is_answer[:, 1:]
        loss = functional.cross_entropy(logits[wanted], ids[:, 1:][wanted])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            right = answers_right(model, sums, sums.held_out[:2000]).float().mean().item()
            print(f"step {step}/{STEPS}  loss {loss.item():.5f}  held-out exact {right:.2%}", flush=True)


def write(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write the model, rounded to bfloat16, and its tokenizer in Hugging Face's layout."""
    model.bfloat16()
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=END_ID, pad_token_id=END_ID, max_new_tokens=8
    )
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)


def evaluate(directory: Path, sums: Sums, rows: torch.Tensor) -> None:
    """Print how many of the sums the written model answers exactly, in float32 and in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        exact = int(answers_right(model, sums, rows).sum())
        print(f"{dtype}: {exact} of {len(rows)} exact", flush=True)


def main() -> None:
    """Train and write, unless told only to evaluate; then evaluate what was written."""
    parser = argparse.ArgumentParser(description="Train or evaluate the adder.")
    parser.add_argument("--directory", type=Path, default=ADDER, help="where the model is written and read")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate what the directory holds")
    parser.add_argument("--all", action="store_true", help="evaluate on all 1,000,000 sums")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    sums = build_sums()
    if not options.evaluate:
        model = build_model()
        train(model, sums)
        write(model, options.directory)
    evaluate(options.directory, sums, torch.arange(NUMBERS**2) if options.all else sums.held_out)


if __name__ == "__main__":
    main()
