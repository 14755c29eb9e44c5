"""The smallest loop: one prompt, always the most likely token, until the model ends the text.

Cost: one prefill of the prompt, then one decode for each token. Shares steps: each decode runs in one forward
with whatever other callers have requested at that moment.

    python clients/python/examples/greedy_loop.py [TARGET] [PROMPT]
"""

from __future__ import annotations

import sys
from collections.abc import Container

from quire import Client


def greedy(client: Client, prompt: list[int], count: int, end: Container[int]) -> list[int]:
    """Up to `count` next tokens. A token in `end` ends the text and is not part of it."""
    text: list[int] = []
    with client.prefill(prompt) as cache:  # The block always releases the cache.
        token = cache.output.token_id
        while token not in end and len(text) < count:
            text.append(token)
            if len(text) < count:
                token = cache.decode(token).token_id
    return text


def main(target: str = "127.0.0.1:50051", prompt: str = "12+34=") -> None:
    """Prints the prompt and what follows it."""
    with Client(target, timeout_s=120) as client:
        tokenizer = client.tokenizer()
        text = greedy(client, tokenizer.encode(prompt), 128, tokenizer.end_ids)
    print(prompt + tokenizer.decode(text))


if __name__ == "__main__":
    main(*sys.argv[1:])
