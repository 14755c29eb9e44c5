"""Perplexity of a file, which may be longer than the model's context, in overlapping windows.

Each token is scored once, after at least half a window of context (as far as there is that much). Forward's
`score_from` says where the scored part of a window begins; the tokens before it are context.

Cost: every token is computed about twice; logits are computed for scored tokens only. No cache is kept.
Shares steps: the windows of a BatchForward with one another, and with other callers.

    python clients/python/examples/perplexity.py [TARGET] [FILE]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from quire import Client, ScoreItem, checked

WINDOWS_PER_CALL = 16


def windows(tokens: list[int], window: int, stride: int) -> list[ScoreItem]:
    """Windows of `window` tokens. All but the first score their last `stride` tokens, the last one fewer."""
    items = [ScoreItem(tokens[:window])]
    for scored in range(window, len(tokens), stride):
        begin = scored + stride - window
        items.append(ScoreItem(tokens[begin : scored + stride], score_from=scored - begin))
    return items


def logprobs(client: Client, tokens: list[int], window: int, stride: int) -> list[float]:
    """The log-probability of each token except the first, in nats."""
    found: list[float] = []
    items = windows(tokens, window, stride)
    for at in range(0, len(items), WINDOWS_PER_CALL):
        for scored in checked(client.score_batch(items[at : at + WINDOWS_PER_CALL])):
            found += scored.token_logprobs
    return found


def main(target: str = "127.0.0.1:50051", file: str = "") -> None:
    """Prints the perplexity of a file; without one, of a line."""
    text = Path(file).read_text(encoding="utf-8") if file else "12+34=46"
    with Client(target, timeout_s=600) as client:
        tokens = client.tokenizer().encode(text)
        window = min(client.model_info().model.max_seq_len, 2048)
        found = logprobs(client, tokens, window, window // 2)
    print(f"{len(found)} tokens scored, perplexity {math.exp(-math.fsum(found) / len(found)):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
