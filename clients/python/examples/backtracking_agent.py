"""An agent that backtracks after a failure: depth-first search with TruncateKV.

It generates the most likely answer and asks a tool whether it is good (here: is it a number divisible by
five?). If not, the cache is truncated to the last token that had another likely choice, and the agent
continues from there. The tokens before that are neither sent nor computed again.

Cost: one prefill, one decode for each token that is tried, one TruncateKV for each rejected branch; no
forward is repeated. Shares steps: each decode with other callers.

    python clients/python/examples/backtracking_agent.py [TARGET] [PROMPT]
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Container, Generator

from quire import Client, StepOutput, output_options

BRANCHES = 4
CAREFUL = output_options(top_logprobs=BRANCHES)
MAX_TRIES = 200


def choices(output: StepOutput) -> list[int]:
    """The most likely tokens, the best one last, so that `pop` returns it first."""
    return list(reversed(output.top.token_ids))


def answers(
    client: Client, prompt: list[int], count: int, end: Container[int]
) -> Generator[list[int], None, None]:
    """Texts of at most `count` tokens: the greedy one, then others, each by the latest untried choice."""
    with client.prefill(prompt, output=CAREFUL) as cache:
        text: list[int] = []
        # For each token of the text, and for the next one, the untried alternatives.
        untried = [choices(cache.output)]
        while untried:
            if not untried[-1]:
                untried.pop()
                text = text[:-1]
                continue
            token = untried[-1].pop()
            if token in end:
                yield text
            elif len(text) + 1 == count:
                yield [*text, token]
            else:
                if cache.seq_len > len(prompt) + len(text):
                    cache.truncate(len(prompt) + len(text))
                text = [*text, token]
                untried.append(choices(cache.decode(token, output=CAREFUL)))


def is_good(answer: str) -> bool:
    """The tool."""
    return answer.isdecimal() and int(answer) % 5 == 0


def main(target: str = "127.0.0.1:50051", prompt: str = "12+34=") -> None:
    """Prints each attempt and the tool's response."""
    with Client(target, timeout_s=120) as client:
        tokenizer = client.tokenizer()
        texts = answers(client, tokenizer.encode(prompt), 4, tokenizer.end_ids)
        with contextlib.closing(texts):  # Releases the cache.
            for _, text in zip(range(MAX_TRIES), texts, strict=False):
                answer = tokenizer.decode(text)
                print(repr(answer), "yes" if is_good(answer) else "no")
                if is_good(answer):
                    break


if __name__ == "__main__":
    main(*sys.argv[1:])
