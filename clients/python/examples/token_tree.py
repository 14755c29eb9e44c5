"""Tree speculation: several continuations are drafted, one forward verifies them, and one path is kept.

The drafting model grows the tree level by level: one forward of the whole tree predicts the likeliest tokens
after each leaf. A chain of drafts ends at the first wrong token; a tree often has the right one beside it.
The text is that of a greedy loop. Both models have one vocabulary; without a second server the model drafts
for itself, which shows how it works and saves nothing.

Cost: for each verify one forward of the drafting model per level, and one of all drafts and a token, which
appends 1 to levels + 1 tokens. Shares steps: with other callers.

    python clients/python/examples/token_tree.py [TARGET] [DRAFT_TARGET]
"""

from __future__ import annotations

import sys
from collections.abc import Container

from quire import Cache, Client, output_options

# Children of each leaf, level by level: 1 + 4 + 8 + 8 tokens.
WIDTHS = (4, 2, 1)


def grow(helper: Cache, root: int) -> tuple[list[int], list[int]]:
    """A tree after the tokens of `helper`: its tokens, and the parent's index of each except the first."""
    tokens, parents, leaves = [root], list[int](), [0]
    for width in WIDTHS:
        held, top = helper.seq_len, output_options(top_logprobs=width)
        said = helper.verify(tokens, parents=parents, output=top)
        helper.truncate(held)
        grown = [(leaf, token) for leaf in leaves for token in said.outputs[leaf].top.token_ids]
        leaves = list(range(len(tokens), len(tokens) + len(grown)))
        parents += [leaf for leaf, _ in grown]
        tokens += [token for _, token in grown]
    return tokens, parents


def generate(
    target: Client, draft: Client, prompt: list[int], count: int, end: Container[int]
) -> tuple[list[int], int]:
    """At most `count` tokens, the end token included, and how many verifies they took."""
    verifies = 0
    with target.prefill(prompt) as cache, draft.prefill(prompt) as helper:
        text = [*prompt, cache.output.token_id]
        while len(text) < len(prompt) + count and text[-1] not in end:
            if len(text) - 1 > helper.seq_len:
                helper.extend(text[helper.seq_len : -1])
            tree, parents = grow(helper, text[-1])
            verified = cache.verify(tree, parents=parents)
            verifies += 1
            for token in verified.tokens:
                text.append(token)
                if token in end:
                    break
    return text[len(prompt) :][:count], verifies


def main(target: str = "127.0.0.1:50051", draft_target: str = "") -> None:
    """Prints the text, and how many tokens each verify gave."""
    with Client(target, timeout_s=120) as client, Client(draft_target or target, timeout_s=120) as draft:
        tokenizer = client.tokenizer()
        prompt = tokenizer.encode("12+34=")
        text, verifies = generate(client, draft, prompt, 64, tokenizer.end_ids)
    print("12+34=" + tokenizer.decode(text))
    print(f"{len(text)} tokens, {verifies} verifies")


if __name__ == "__main__":
    main(*sys.argv[1:])
