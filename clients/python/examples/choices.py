"""Multiple choice: which of several answers is the most likely continuation of a question.

Nothing is generated. Each choice is scored after the question, whose KV is computed once for all of them.

Cost: one BatchForward: the question once, and each choice. No cache is kept. Shares steps: the choices with
one another, and with other callers; send many questions in one call, or on a Session, to fill the steps.

    python clients/python/examples/choices.py [TARGET] [QUESTION CHOICE CHOICE ...]
"""

from __future__ import annotations

import itertools
import sys

from quire import Client, ScoreItem, checked
from tokenizers import Tokenizer


def choose(
    client: Client, tokenizer: Tokenizer, question: str, choices: list[str]
) -> list[tuple[float, str]]:
    """The choices with their log-probabilities, the most likely one first.

    For choices of different lengths, divide by the number of tokens or bytes to get the mean.
    """
    context = tokenizer.encode(question).ids
    items = []
    for choice in choices:
        whole = tokenizer.encode(question + choice).ids
        # A token that spans the end of the question and the beginning of the choice counts for the choice.
        common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(context, whole[:-1], strict=False))
        items.append(ScoreItem(whole, score_from=len(list(common))))
    scores = [scored.logprob for scored in checked(client.score_batch(items))]
    return sorted(zip(scores, choices, strict=True), reverse=True)


def main(target: str = "127.0.0.1:50051", question: str = "12+34=", *choices: str) -> None:
    """Prints the choices with their log-probabilities, the most likely one first."""
    with Client(target, timeout_s=120) as client:
        info = client.model_info(include_tokenizer=True)
        tokenizer = Tokenizer.from_buffer(info.tokenizer_json)
        for logprob, choice in choose(client, tokenizer, question, list(choices) or ["45", "46", "47", "64"]):
            print(f"{logprob:.3f} {choice}")


if __name__ == "__main__":
    main(*sys.argv[1:])
