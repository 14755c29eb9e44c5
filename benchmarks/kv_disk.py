"""KV that comes back from disk after everything was killed: `python -m benchmarks.kv_disk [--tokens N]`.

A gateway with one worker computes the KV of the beginning of a text, which the worker stores (`--kv-disk`).
The files of the rest are copies of these under the names of their pages, which would take minutes to compute
(`--computed` computes more). When the gateway has a cache of all of it, it and the worker get SIGKILL, and
both are started again over the same directories. The next Decode needs all KV: the worker reads it.

`restored_s` is the time of that call, with all that is in its way, and `restored_gb_per_s` its KV by that.
Beside it, in the same run, `plain_gb_per_s`, at which one thread reads the same files into new memory, and
`computed_s`, the time of the prefill. `replay_s` is that for all tokens; a real one takes longer, since later
tokens have more to attend to.

The files are in the page cache, or with `--cold` they are not.

With `--decodes N` it measures what storing costs others instead: N callers decode continuously, tokens of
their own, at a worker with KV on disk and at one without, in turns; the pages of their earlier caches give
way to those of later ones. Prints JSON, and what it does meanwhile to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from quire.v1 import executor_pb2 as pb

from benchmarks import machine
from benchmarks.gateway_process import GatewayProcess
from benchmarks.shapes import DEFAULT_SHAPE, SHAPES
from benchmarks.weights import make_model
from workers.kv.page_pool import page_digest

_PAGE_TOKENS = 16
_TIMEOUT_S = 7200.0
_POLL_S = 0.05
# How often a worker looks for files of others, about.
_LISTED_S = 1.0
# What a virtual machine has freed, its host may take back within seconds, and new memory is then slow. A
# worker that starts has such memory, so the plain read gets it too.
_MEMORY_IS_GONE_S = 10.0
_DECODED_TOKENS = 48
_ROUND_S = 20.0


def stored_files(directory: Path) -> list[Path]:
    """The files of pages."""
    return [path for path in directory.rglob("*") if len(path.name) == 64 and path.is_file()]


def plain_read_s(files: Sequence[Path]) -> float:
    """The time of one thread that reads all files into new memory, as that of a worker is when it starts."""
    began_s, size = time.perf_counter(), files[0].stat().st_size
    memory = np.empty((len(files), size), np.uint8)
    for path, row in zip(files, memory, strict=True):
        with path.open("rb", buffering=0) as file:
            file.readinto(row.data)
    return time.perf_counter() - began_s


def continue_on_disk(directory: Path, tokens: Sequence[int]) -> None:
    """Makes files for what follows the one text that is on disk, with the contents of its pages in turns."""
    files = {path.name[:32]: path for path in stored_files(directory)}
    (digest,) = files.keys() - {path.name[32:] for path in files.values()}
    root, contents = files[digest].parents[1], [path.read_bytes() for path in files.values()]
    for index in range(len(tokens) // _PAGE_TOKENS):
        page = tokens[index * _PAGE_TOKENS :][:_PAGE_TOKENS]
        parent, digest = digest, page_digest(bytes.fromhex(digest), page).hex()
        content = contents[index % len(contents)]
        (root / digest[:2]).mkdir(mode=0o700, exist_ok=True)
        with (root / digest[:2] / (digest + parent)).open("wb", buffering=0) as file:
            file.writelines([content[:24], bytes.fromhex(digest), memoryview(content)[40:]])


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Makes the next read of each file one of the disk."""
    os.sync()
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def kill_all(gateway: GatewayProcess) -> None:
    """Kills the gateway and its workers."""
    for process in psutil.Process(gateway.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    gateway.process.kill()
    gateway.process.wait()


def restore(model: Path, scratch: Path, tokens: int, computed: int, *, cold: bool) -> dict[str, Any]:
    """Computes, kills, starts again, and decodes."""
    kv, rng = scratch / "kv", random.Random(1)
    text = [rng.randrange(1000) for _ in range(tokens)]
    pages, computed_pages = tokens // _PAGE_TOKENS, computed // _PAGE_TOKENS
    flags = ["--kv-disk", str(kv), "--kv-disk-gb", "1000"]
    flags += ["--data-dir", str(scratch / "data"), "--kv-pages", str(pages + 64)]
    with GatewayProcess(model=str(model), flags=flags) as gateway:
        _say(f"computes {computed} tokens")
        began_s = time.perf_counter()
        gateway.stub.Prefill(pb.PrefillRequest(token_ids=text[:computed]), timeout=_TIMEOUT_S)
        computed_s = time.perf_counter() - began_s
        while gateway.status().workers[0].kv_disk.written_pages < computed_pages:
            time.sleep(_POLL_S)
        if computed < tokens:
            _say(f"makes the files of {tokens - computed} more")
            continue_on_disk(kv, text[computed:])
            time.sleep(2 * _LISTED_S)
        cache = gateway.stub.Prefill(pb.PrefillRequest(token_ids=text), timeout=_TIMEOUT_S).kv_cache
        kill_all(gateway)
    files = stored_files(kv)
    if cold:
        drop_from_page_cache(files)
    _say("killed everything, starts again")
    began_s = time.perf_counter()
    with GatewayProcess(model=str(model), flags=flags) as gateway:
        started_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        decode = pb.DecodeRequest(cache_id=cache.cache_id, token_id=1, position=tokens)
        answer = gateway.stub.Decode(decode, timeout=_TIMEOUT_S)
        restored_s = time.perf_counter() - began_s
        worker = gateway.status().workers[0]
    _say("reads the same files without a server")
    if cold:
        drop_from_page_cache(files)
    time.sleep(_MEMORY_IS_GONE_S)
    plain_s = plain_read_s(files)
    kv_bytes = sum(path.stat().st_size for path in files)
    replay_s = computed_s * tokens / computed
    return {
        "tokens": tokens,
        "kv_bytes": kv_bytes,
        "page_cache": "cold" if cold else "warm",
        "computed_before": computed,
        "computed_s": round(computed_s, 3),
        "replay_s": round(replay_s, 3),
        "started_s": round(started_s, 3),
        "restored_s": round(restored_s, 3),
        "replayed_tokens": answer.replayed_tokens,
        "read_pages": worker.kv_disk.read_pages,
        "computed_tokens": worker.counts.step_tokens,
        "restored_gb_per_s": round(kv_bytes / restored_s / 1e9, 3),
        "plain_gb_per_s": round(kv_bytes / plain_s / 1e9, 3),
        "share_of_plain": round(plain_s / restored_s, 3),
        "times_faster": round(replay_s / restored_s, 1),
    }


class Callers:
    """Threads that decode until they are stopped."""

    def __init__(self, gateway: GatewayProcess, number: int, prompt_tokens: int, seed: int) -> None:
        self.tokens = 0
        self._gateway, self._prompt_tokens = gateway, prompt_tokens
        self._stops = threading.Event()
        seeds = range(seed * 1000, seed * 1000 + number)
        self._threads = [threading.Thread(target=self._run, args=(random.Random(seed),)) for seed in seeds]

    def _run(self, rng: random.Random) -> None:
        stub = self._gateway.stub
        while not self._stops.is_set():
            prompt = [rng.randrange(1000) for _ in range(self._prompt_tokens)]
            cache = stub.Prefill(pb.PrefillRequest(token_ids=prompt), timeout=_TIMEOUT_S).kv_cache
            for position in range(len(prompt), len(prompt) + 8 * _DECODED_TOKENS):
                if self._stops.is_set():
                    break
                token = rng.randrange(1000)
                request = pb.DecodeRequest(cache_id=cache.cache_id, token_id=token, position=position)
                stub.Decode(request, timeout=_TIMEOUT_S)
                self.tokens += 1
            stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=cache.cache_id), timeout=_TIMEOUT_S)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """They decode as long as the block runs."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stops.set()
            for thread in self._threads:
                thread.join()


def decode_rate(gateway: GatewayProcess, callers: int, seed: int, seconds: float) -> float:
    """The tokens a second that callers decode, after their prompts."""
    own = Callers(gateway, callers, _PAGE_TOKENS, seed)
    with own.running():
        time.sleep(seconds / 10)
        began_s, before = time.perf_counter(), own.tokens
        time.sleep(seconds)
        return (own.tokens - before) / (time.perf_counter() - began_s)


def compare_decodes(model: Path, scratch: Path, callers: int, rounds: int) -> dict[str, Any]:
    """The rate of decodes with and without KV on disk, in turns."""
    # So few that the pages of finished callers give way.
    common = ["--kv-pages", str(callers * (8 * _DECODED_TOKENS // _PAGE_TOKENS + 4))]
    stores = [*common, "--kv-disk", str(scratch / "kv"), "--kv-disk-gb", "1000"]
    rates: dict[str, list[float]] = {"without": [], "with": []}
    with (
        GatewayProcess(model=str(model), flags=common) as plain,
        GatewayProcess(model=str(model), flags=stores) as storing,
    ):
        for number in range(rounds):
            for name, gateway in (("without", plain), ("with", storing)):
                rates[name].append(decode_rate(gateway, callers, number, _ROUND_S))
                _say(f"round {number + 1} of {rounds}, {name} disk: {rates[name][-1]:.1f} tokens/s")
        disk = storing.status().workers[0].kv_disk
    means = {name: sum(found) / len(found) for name, found in rates.items()}
    return {
        "callers": callers,
        "tokens_per_s": {name: [round(rate, 2) for rate in found] for name, found in rates.items()},
        "ratio": round(means["with"] / means["without"], 4),
        "written_pages": disk.written_pages,
        "dropped_pages": disk.dropped_pages,
    }


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default=DEFAULT_SHAPE)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--computed", type=int, default=2048, help="of them, before everything is killed")
    parser.add_argument("--cold", action="store_true", help="read from the disk and not from the page cache")
    parser.add_argument("--decodes", type=int, metavar="N", help="measure what N callers lose instead")
    parser.add_argument("--rounds", type=int, default=3, help="of --decodes")
    options = parser.parse_args()
    with machine.report() as found, tempfile.TemporaryDirectory(prefix="kv-disk-") as directory:
        scratch, found["shape"] = Path(directory), options.shape
        _say("makes a model")
        model = make_model(SHAPES[options.shape], scratch / "model")
        if options.decodes:
            found.update(compare_decodes(model, scratch, options.decodes, options.rounds))
        else:
            computed = min(options.computed, options.tokens)
            found.update(restore(model, scratch, options.tokens, computed, cold=options.cold))


if __name__ == "__main__":
    main()
