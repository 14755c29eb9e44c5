"""`quire doctor`: what this machine can do, what prevents serving or makes it slow, and what to do."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from service.cli.child import NoAnswer, ask
from service.cli.probes import GIB, OK, PROBES, PROBLEM, SLOW, Finding
from service.config import Config
from service.config_sources import Settings, read_settings
from service.printable import escaped

_COLUMNS = 80
_NAME_COLUMNS = 11
_PROBE_S = 15.0
# The first import of torch may read 1 GB from a slow disk.
_TORCH_S = 90.0
# A channel of DDR4-2400 has 19.2 GB/s.
_SLOW_READ_BYTES_PER_S = 10e9
# A gateway, a worker and torch take about so much before any weights.
_LEAST_MEMORY_BYTES = 1 << 30
_NO_GPU = "none: models run on the CPU"
_VARIABLE = "QUIRE_CPU_ISA"
_UNSET = f"unset {_VARIABLE}, or name another instruction set that this machine has"
_BUILD = "compile them: python -m kernels.cpu.library, which needs g++ 12 or later"


def run(options: argparse.Namespace) -> int:
    """Prints the table, or JSON. Returns the exit status: 1 if something prevents serving."""
    settings = read_settings({"config": options.config}, os.environ)
    system = _system(options.config or "")
    findings = [*_settings(settings), *_limits(settings.config), *system, *_torch()]
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            _print(finding)
    return 1 if any(finding.state == PROBLEM for finding in findings) else 0


def _print(finding: Finding) -> None:
    head = f"{finding.state:8}{finding.name:{_NAME_COLUMNS}}"
    indent = " " * len(head)
    print(textwrap.fill(head + escaped(finding.text), _COLUMNS, subsequent_indent=indent))
    if finding.advice and finding.state != OK:
        print(
            textwrap.fill(f"{indent}-> {escaped(finding.advice)}", _COLUMNS, subsequent_indent=f"{indent}   ")
        )


def _settings(settings: Settings) -> Iterator[Finding]:
    if settings.errors:
        text = f"{len(settings.errors)} are refused"
        yield Finding("settings", PROBLEM, text, "`quire config check` says which, and why")
    else:
        yield Finding("settings", OK, f"{len(settings.sources)} given, by the environment or a file")


def _asked(module: str, *arguments: str, timeout_s: float) -> tuple[Sequence[dict[str, Any]], str]:
    """What a program says, and why it did not say all; "" if it did."""
    try:
        return ask(module, *arguments, timeout_s=timeout_s), ""
    except NoAnswer as error:
        return error.lines, error.why


def _system(path: str) -> Iterator[Finding]:
    found, why = _asked("service.cli.probes", path, *PROBES, timeout_s=_PROBE_S)
    yield from (Finding(**one) for one in found)
    known = [one["name"] for one in found]
    # They are asked in turn: what comes after the one that hangs is not known.
    if missing := [name for name in PROBES if name not in known] if why else []:
        advice = f"not known therefore: {', '.join(missing[1:])}" if missing[1:] else ""
        yield Finding(missing[0], PROBLEM, why, advice)


def _limits(config: Config) -> Iterator[Finding]:
    """As a worker sees them, which this process and its children share."""
    found, why = _asked("workers.machine_limits", timeout_s=_PROBE_S)
    if why:
        yield Finding("cores", PROBLEM, why)
        return
    facts = found[0]
    total, usable = facts["cores"], facts["usable_cores"]
    text = f"all {total} are usable"
    if usable < total:
        text = f"{usable:g} of {total} are usable, by affinity and cgroup"
    too_many = (config.threads_per_worker or 0) * config.worker_slots > usable
    advice = "lower --threads-per-worker, or leave it out: threads without a core make others wait"
    yield Finding("cores", SLOW if too_many else OK, text, advice if too_many else "")
    available, limit = facts["available_bytes"], facts["memory_limit_bytes"]
    text = f"{available / GIB:.1f} GiB available of {facts['memory_bytes'] / GIB:.1f}"
    if limit is not None and limit < facts["memory_bytes"]:
        text += f"; a cgroup allows {limit / GIB:.1f}"
    too_little = available < _LEAST_MEMORY_BYTES
    advice = "free at least 1 GiB, and the size of the model" if too_little else ""
    yield Finding("memory", PROBLEM if too_little else OK, text, advice)


def _torch() -> Iterator[Finding]:
    parts, why = _asked("workers.models.machine", timeout_s=_TORCH_S)
    facts: Mapping[str, Any] = {name: value for part in parts for name, value in part.items()}
    if "cpu" in facts:
        yield from _cpu(facts)
    if "gpus" in facts:
        yield from _gpus(facts)
    if "read_bytes_per_s" in facts:
        rate = facts["read_bytes_per_s"]
        slow = rate < _SLOW_READ_BYTES_PER_S
        text = f"{rate / 1e9:.1f} GB/s of plain reads"
        advice = "a token reads all weights: look for other programs or guests, or for empty memory slots"
        yield Finding("bandwidth", SLOW if slow else OK, text, advice)
    if why:
        advice = "install as README.md says; workers cannot start without torch"
        yield Finding("torch", PROBLEM, why, _UNSET if _VARIABLE in why else advice)


def _cpu(facts: Mapping[str, Any]) -> Iterator[Finding]:
    sets: Sequence[str] = facts["instruction_sets"]
    slow = "" if sets else "nothing, or another machine: workers multiply faster with AVX2 or NEON and later"
    text = f"{facts['cpu']}: {', '.join(sets) or 'no instruction set of the kernels'}"
    yield Finding("cpu", SLOW if slow else OK, text, slow)
    advice = _BUILD if facts["compiler"] else f"install g++ 12 or later, then {_BUILD}"
    for product in dict.fromkeys(facts["products"][dtype] for dtype in ("bfloat16", "float32")):
        state = SLOW if product.startswith("torch") else OK
        yield Finding("products", state, product, _UNSET if _VARIABLE in product else slow or advice)
    if facts["library"]:
        kind = "prebuilt" if "prebuilt" in facts["library"] else "compiled on this machine"
        yield Finding("kernels", OK, f"{facts['kernels']}, {kind}; torch {facts['torch']}")


def _gpus(facts: Mapping[str, Any]) -> Iterator[Finding]:
    gpus: Sequence[Mapping[str, Any]] = facts["gpus"]
    for gpu in gpus:
        free, total = (gpu[name] / 2**30 for name in ("free_bytes", "memory_bytes"))
        text = f"{gpu['name']}, sm_{gpu['capability'].replace('.', '')}, {free:.1f} GiB free of {total:.1f}"
        yield Finding("gpu", OK, f"{text}, CUDA {facts['cuda']}, driver {facts['driver'] or 'unknown'}")
    if gpus and facts["triton"] is None:
        yield Finding(
            "triton", PROBLEM, "not installed", "install the version that README.md says; or --device cpu"
        )
    elif gpus:
        yield Finding("triton", OK, facts["triton"])
    elif facts["has_device_files"]:
        text = facts["warning"] or f"there is one, which torch (CUDA {facts['cuda']}) cannot use"
        yield Finding("gpu", SLOW, text, "install a torch for its driver, or a newer driver")
    else:
        yield Finding("gpu", OK, _NO_GPU)
