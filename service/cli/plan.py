"""`quire plan`: what a model needs on a machine, from its config alone."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.cli.child import NoAnswer, ask
from service.config import Config
from service.model_names import (
    SHIPPED_MODEL,
    SHIPPED_MODEL_DIR,
    WEIGHTLESS_MODEL,
    is_hub_id,
    is_model,
    model_problem,
)
from service.printable import escaped
from service.quantised import quantised

_TIMEOUT_S = 120.0
_COLUMNS = 80


def run(options: argparse.Namespace) -> int:
    """Prints the plan. Returns the exit status: 1 if the model does not fit, or cannot be planned."""
    try:
        if options.context < 1 or (options.memory is not None and options.memory < 1):
            raise NoAnswer("--context and --memory must be at least 1", ())
        worker = Config()
        asked = {
            "directory": str(_directory(options.model)),
            "dtype": options.dtype,
            "gpu": options.gpu,
            "memory_bytes": options.memory,
            "context": options.context,
            "steps": {
                "max_items": worker.max_batch_items,
                "gpu_memory_utilization": worker.gpu_memory_utilization,
            },
        }
        (found,) = ask("workers.plan", json.dumps(asked), timeout_s=_TIMEOUT_S)
        if "error" in found:
            raise NoAnswer(found["error"], ())
    except NoAnswer as error:
        print(f"quire: {escaped(error.why)}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0


def _directory(model: str) -> Path:
    """A directory with the model's config.json, which may be downloaded. Raises NoAnswer."""
    if is_hub_id(model):
        from service.cli import hub

        try:
            return hub.find_files(model, ("config.json",))
        except hub.HubError as error:
            raise NoAnswer(str(error), ()) from None
    if model == WEIGHTLESS_MODEL:
        raise NoAnswer(f"{model} cannot be planned: it has neither a config.json nor weights", ())
    directory = SHIPPED_MODEL_DIR if model == SHIPPED_MODEL else Path(model)
    if not is_model(str(directory)):
        raise NoAnswer(f"{model} cannot be planned: {model_problem(model)}", ())
    if problem := quantised(directory):
        raise NoAnswer(f"{model} cannot be planned: {problem}", ())
    return directory


def _print(found: Mapping[str, Any]) -> None:
    gib = {name: value / 2**30 for name, value in found.items() if name.endswith("_bytes")}
    rows = {
        "model": f"{found['architecture']}, {found['num_parameters']:,} parameters, {found['dtype']}",
        "device": f"{found['device']}, {gib['memory_bytes']:.1f} GiB, {found['bytes_per_s'] / 1e9:,.0f} GB/s,"
        f" {found['flops_per_s'] / 1e12:,.2f} TFLOP/s",
        "": f"({found['source']})",
        "weights": f"{gib['weight_bytes']:.2f} GiB",
        "KV": f"{found['kv_bytes_per_token'] / 1024:,.1f} KiB per token",
        "pool": f"{found['pages']:,} pages of {found['page_tokens']} tokens, {gib['pages_bytes']:.2f} GiB",
        "contexts": f"{found['contexts']:,} of {found['context']:,} tokens; the longest has"
        f" {min(found['max_seq_len'], found['pool_tokens']):,}",
    }
    for name, text in rows.items():
        print(escaped(f"{name:10}{text}"))
    print(f"\n{'tokens/s':22}{'roof':>10}{'reached':>10}{'expected':>10}")
    for rate in found["rates"]:
        reached = "-" if rate["fraction"] is None else f"{rate['fraction']:.0%}"
        expected = "-" if rate["expected"] is None else f"{rate['expected']:,.0f}"
        print(f"{rate['what']:22}{rate['roof']:>10,.0f}{reached:>10}{expected:>10}")
    print()
    note = "The roof is what reads and products alone would take. "
    if found["rates"][0]["fraction"] is None:
        note += "What Quire reaches of it was not measured on such a device."
    else:
        note += (
            "Reached is what Quire's service reached of it with Qwen3-0.6B on a CPU with the same kernels."
        )
    print(textwrap.fill(note, _COLUMNS))
