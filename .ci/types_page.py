"""Writes the table of docs/models.md: what becomes of each type of model that transformers has.

Each type with a causal or a multimodal language model is made small, with random weights, saved, loaded as a
worker does, and compared over pages with the library's own model: prefills, chunks and decodes of texts,
within 1e-4. Each runs in a process of its own, with bounds on time and memory. Run it for each release and
each new version of the library, on an idle machine, where it takes a few minutes:
`PYTHONPATH=. .venv/bin/python .ci/types_page.py docs/models.md`. With names of types instead it prints what
becomes of these, and writes nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING

from tests.tiny_types import LANGUAGE_MODELS, NotSmall, small_model
from workers.executors.loading import choose_backend, load_served
from workers.models.errors import ModelError, without_path
from workers.models.library.gathered_model import GatheredModel
from workers.models.library.loading import make_library_model  # noqa: F401 - before the processes are forked
from workers.models.self_check import check_parity

NATIVE, PACKED = "native", "transformers, packed"
ONE_BY_ONE, WITH_STATE = "transformers, text by text", "transformers, recurrent"
REFUSED, NOT_TRIED = "refused", "not tried"

_SECONDS, _BYTES = 180, 12 << 30
_BEGIN, _END = "<!-- types: .ci/types_page.py writes this -->", "<!-- end of types -->"


class Found(NamedTuple):
    """What becomes of a type; `why` if it is not served."""

    kind: str
    why: str = ""


def becomes_of(model_type: str) -> Found:
    """Makes, saves, loads and compares a model."""
    config = CONFIG_MAPPING[model_type]()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if getattr(config, "is_encoder_decoder", False):
            config.save_pretrained(directory)
        else:
            try:
                module = small_model(model_type)
            except NotSmall as error:
                return Found(NOT_TRIED, str(error))
            module.save_pretrained(directory)
            # As the library reads it: some types lose a part of their weights.
            module = type(module).from_pretrained(directory, dtype=torch.float32).eval()
        try:
            choice = choose_backend(directory, "auto")
            model, description = load_served(
                *(directory, "float32", torch.device("cpu"), None),
                backend=choice.backend,
                reason=choice.reason,
                self_check=True,
            )
            check_parity(
                model,
                lambda tokens: module(input_ids=tokens[None], use_cache=False).logits[0],
                what="it",
                vocab_size=description.vocab_size,
                max_seq_len=description.max_seq_len,
            )
        except ModelError as error:
            return Found(REFUSED, without_path(str(error), directory))
    if choice.backend == "native":
        return Found(NATIVE)
    if not isinstance(model, GatheredModel):
        return Found(PACKED)
    return Found(WITH_STATE if model.state_shapes else ONE_BY_ONE)


def _child(model_type: str, answer: Connection) -> None:
    """In a process of its own."""
    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            found = becomes_of(model_type)
        except BaseException as error:
            found = Found(NOT_TRIED, f"{type(error).__name__}: {' '.join(str(error).split())[:100]}")
    answer.send(tuple(found))


def in_process(model_type: str) -> Found:
    """What becomes of a type, or that it takes too long or too much."""
    context = multiprocessing.get_context("fork")  # the library is imported once, for all
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, sender), daemon=True)
    process.start()
    sender.close()
    try:
        return (
            Found(*receiver.recv())
            if receiver.poll(_SECONDS)
            else Found(NOT_TRIED, f"took {_SECONDS} seconds")
        )
    except EOFError:
        return Found(NOT_TRIED, "its process died")
    finally:
        process.kill()
        process.join()


def try_all(types: list[str]) -> dict[str, Found]:
    """Each type's, printed as it is found."""
    found: dict[str, Found] = {}

    def try_one(model_type: str) -> None:
        found[model_type] = in_process(model_type)
        print(
            f"{len(found)}/{len(types)} {model_type}: {': '.join(filter(None, found[model_type]))}",
            flush=True,
        )

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(try_one, types))
    return dict(sorted(found.items()))


def table(found: Mapping[str, Found]) -> str:
    """What is served, and by what is refused why."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for model_type, (kind, why) in found.items():
        (by_reason[_short(why, model_type)] if kind == REFUSED else by_kind[kind]).append(model_type)
    not_tried = by_kind.pop(NOT_TRIED, [])
    served = sum(map(len, by_kind.values()))
    lines = [
        f"Of the {len(found)} types of transformers {transformers.__version__}, {served} are served:",
        "",
        *(
            f"- **{kind}**: {', '.join(by_kind[kind])}"
            for kind in (NATIVE, PACKED, ONE_BY_ONE, WITH_STATE)
            if by_kind[kind]
        ),
        "",
        "**Not tried**, as no tiny model of them was made, or as the library runs them on other inputs only: "
        + ", ".join(not_tried),
        "",
        "| not served, and why | types |",
        "|---|---|",
        *(f"| {why} | {', '.join(names)} |" for why, names in sorted(by_reason.items())),
    ]
    return "\n".join(lines)


def _short(why: str, model_type: str) -> str:
    """A reason as it is for other types too, in a cell."""
    why = why.partition("; and native code: ")[0]
    return re.sub(rf"\b{re.escape(model_type)}\b", "TYPE", why).replace("|", "\\|").replace("<", "\\<")[:200]


def main() -> None:
    """See the module."""
    page, names = Path(sys.argv[1]), sys.argv[1:]
    if page.suffix != ".md":
        try_all(names)
        return
    written = table(try_all(sorted({*LANGUAGE_MODELS} & {*CONFIG_MAPPING})))
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    page.write_text(f"{before}{_BEGIN}\n\n{written}\n\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
