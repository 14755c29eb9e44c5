"""Runs lm-evaluation-harness, with `quire` among its models: QuireLM is what the harness asks of one.

Cost: a choice costs its own tokens; its context is computed once for all that share it. Requests run in the
order of the harness. Shares steps: the `batch_size` items of a call with one another and with other callers.

    python clients/python/examples/lm_eval_adapter.py --model quire --model_args target=... --tasks ...
"""

from typing import Any

from quire import Client, SamplingParams, Scored, ScoreItem, checked, item
from quire.errors import from_status
from tokenizers import Tokenizer


class QuireLM:
    """Needs no harness. Requests have `args`, as its Instances."""

    def __init__(self, target: str = "127.0.0.1:50051", batch_size: int | str = 64, **_: Any) -> None:
        super().__init__()
        self._client = Client(target, timeout_s=3600)
        info = self._client.model_info(include_tokenizer=True)
        self._tokenizer, self._room = Tokenizer.from_buffer(info.tokenizer_json), info.model.max_seq_len
        self._size = 64 if str(batch_size).startswith("auto") else int(batch_size)
        has_bos = info.model.HasField("bos_token_id")
        self._prefix = [info.model.bos_token_id if has_bos else info.model.eos_token_ids[0]]

    def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        """Of args (context, continuation): how likely the latter is, and whether it is the greedy one."""
        texts = []
        for context, continuation in (request.args for request in requests):
            before = self._encode(context.rstrip()) or self._prefix  # Blanks belong to the word behind them.
            whole = self._encode(context + continuation)
            texts.append((whole if context.strip() else before + whole, len(before)))
        return [(scored.logprob, scored.is_greedy) for scored in self._score(texts)]

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        """Of args (text,): how likely it is, in windows as long as the model's context, each token once."""
        found, step = [], self._room - 1
        for tokens in (self._prefix + self._encode(request.args[0]) for request in requests):
            windows = [(tokens[: at + step], at) for at in range(1, len(tokens), step)]
            found.append(sum(scored.logprob for scored in self._score(windows)))
        return found

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """Of args (context, settings): what follows, up to one of the texts `until`."""
        items, texts = [], [""] * len(requests)
        for at, (context, how) in enumerate(request.args for request in requests):
            stop, count = how.get("until") or [], min(how.get("max_gen_toks", 256), self._room - 1)
            prompt = (self._encode(context) or self._prefix)[count - self._room :]
            sampling = SamplingParams(temperature=how.get("temperature", 1) if how.get("do_sample") else 0)
            items.append(item(prompt, item_id=str(at), max_tokens=count, sampling=sampling))
            items[-1].stop.extend([stop] if isinstance(stop, str) else stop)
        for at in range(0, len(items), self._size):
            for chunk in self._client.execute(items[at : at + self._size]):
                if chunk.HasField("error"):
                    raise from_status(chunk.error)
                texts[int(chunk.item_id)] += chunk.text
        return texts

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _score(self, texts: list[tuple[list[int], int]]) -> list[Scored]:
        # Of each text the tokens from an index on, behind as much of what is before as there is room for.
        over = [max(0, len(text) - self._room) for text, _ in texts]
        items = [ScoreItem(text[n:], max(1, at - n)) for (text, at), n in zip(texts, over, strict=True)]
        batches = (items[at : at + self._size] for at in range(0, len(items), self._size))
        return [scored for batch in batches for scored in checked(self._client.score_batch(batch))]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model

    register_model("quire")(type("RegisteredQuireLM", (QuireLM, LM), {}))
    cli_evaluate()
