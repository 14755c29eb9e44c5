"""A model `quire` for lm-evaluation-harness that counts as its `hf` does. Importing this file registers it.

Cost: a choice costs its own tokens; its context is computed once for all that share it. Requests run in the
order of the harness. Shares steps: the `batch_size` items of a call with one another and with other callers.

    python clients/python/examples/lm_eval_adapter.py --model quire --model_args target=... --tasks ...
"""

import importlib.util
from typing import Any

from quire import Client, OutputOptions, ScoreItem, checked, item


class QuireLM:
    """Needs no harness. Requests have `args`, as its Instances."""

    def __init__(self, target: str = "127.0.0.1:50051", batch_size: int | str = 64, **_: Any) -> None:
        super().__init__()
        self._client = Client(target, timeout_s=3600)
        tokenizer, model = self._client.tokenizer(), self._client.model_info().model
        self._room, self._size = model.max_seq_len, int(batch_size) if str(batch_size).isdecimal() else 64
        self._encode, self._prefix = tokenizer.encode, [tokenizer.begin_id]

    def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        """For args (context, continuation): the latter's log-probability, and whether it is greedy."""
        texts = []
        for context, continuation in (request.args for request in requests):  # Blanks begin the next word.
            before, whole = self._encode(context.rstrip()), self._encode(context + continuation)
            texts.append((whole if before else self._prefix + whole, len(whole) - len(before)))
        return self._score(texts)

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        """For args (text,): its log-probability, in windows of the model's context, each token once."""
        found, step = [], self._room
        for text in (self._prefix + self._encode(request.args[0]) for request in requests):
            windows = [(text[: at + step], len(text[at : at + step])) for at in range(1, len(text), step)]
            found.append(sum(logprob for logprob, _ in self._score(windows)))
        return found

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """For args (context, settings): the continuation, up to one of the texts `until`."""
        items, texts = [], [""] * len(requests)
        for at, (context, how) in enumerate(request.args for request in requests):
            count, stop = min(how.get("max_gen_toks", 256), self._room - 1), how.get("until") or []
            prompt = (self._encode(context) or self._prefix)[count - self._room :]
            items.append(item(prompt, item_id=str(at), max_tokens=count))
            items[-1].sampling.temperature = how.get("temperature", 1) if how.get("do_sample") else 0
            items[-1].stop.extend([stop] if isinstance(stop, str) else stop)
        for at in range(0, len(items), self._size):
            for chunk in self._client.execute(items[at : at + self._size]):
                texts[int(chunk.item_id)] += chunk.text
        return texts

    def _score(self, texts: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        # Scores the last `count` tokens of each text. The very last one is not sent, only scored.
        items, scores, found = [], [], []
        for text, count in texts:
            begin, ask = text[-self._room - 1 : -1], OutputOptions(logprob_token_ids=text[-1:])
            items.append(ScoreItem(begin, len(begin) - max(count - 1, 1), ask))
        for at in range(0, len(items), self._size):
            scores += checked(self._client.score_batch(items[at : at + self._size]))
        for (text, count), score in zip(texts, scores, strict=True):
            end, is_greedy = score.outputs[-1], all(score.token_is_argmax[: count - 1])
            logprob = sum(score.token_logprobs[: count - 1]) + end.chosen_logprobs[0]
            found.append((logprob, is_greedy and end.token_id == text[-1]))
        return found


if __name__ == "__main__" or importlib.util.find_spec("lm_eval"):
    from lm_eval import __main__, models  # noqa: F401 - which it loads by itself where no model is known
    from lm_eval.api import model, registry

    registry.register_model("quire")(type("RegisteredQuireLM", (QuireLM, model.LM), {}))
    if __name__ == "__main__":
        __main__.cli_evaluate()
