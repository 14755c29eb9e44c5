"""`quire adapters`: lists a server's LoRA adapters, loads and unloads them."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire import InvalidRequest
from quire.cli.connecting import NO_TIMEOUT_S, connected, line_of
from quire.cli.terminal import CommandFailed, escaped, size

_NAME = "adapter"
_ROW = "{:<{}}  {:>7}  {:>4}  {:>10}  {:>6}  {}"


def list_adapters(options: argparse.Namespace) -> int:
    """Prints a line for each adapter. Returns the exit status."""
    with connected(options) as client:
        adapters = client.list_adapters()
    ids = [escaped(adapter.adapter_id) for adapter in adapters]
    width = max(map(len, [_NAME, *ids]))
    print(_ROW.format(_NAME, width, "version", "rank", "size", "caches", "").rstrip())
    for adapter_id, adapter in zip(ids, adapters, strict=True):
        # Neither is known until a worker has loaded it, and a steering vector has no rank.
        rank, taken = adapter.rank or "-", size(adapter.size_bytes) if adapter.size_bytes else "-"
        notes = " ".join(name for name in ("pinned", "shared") if getattr(adapter, name))
        print(_ROW.format(adapter_id, width, adapter.version, rank, taken, adapter.caches, notes).rstrip())
    return 0


def load_adapter(options: argparse.Namespace) -> int:
    """Loads an adapter. Returns the exit status. Raises OSError for unreadable files."""
    is_directory = Path(options.source).is_dir()
    source = str(Path(options.source).absolute()) if is_directory else options.source
    given = {"files": source} if options.upload else {"source": source}
    with connected(options) as client:
        try:
            adapter = client.load_adapter(
                options.adapter_id, **given, pinned=options.pin, shared=options.shared, timeout_s=NO_TIMEOUT_S
            )
        except InvalidRequest as error:
            if is_directory and not options.upload:
                hint = "--upload sends the directory of this machine, if the server runs on another one"
                raise CommandFailed(line_of(error), hint) from None
            raise
    print(f"loaded {escaped(adapter.adapter_id)} as version {adapter.version}:", end=" ")
    # A steering vector has no rank.
    rank = f"rank {adapter.rank}, " if adapter.rank else ""
    print(f"{rank}{size(adapter.size_bytes)}")
    return 0


def unload_adapter(options: argparse.Namespace) -> int:
    """Unloads an adapter. Raises CommandFailed if it is unknown."""
    with connected(options) as client:
        if not client.unload_adapter(options.adapter_id, shared=options.shared):
            hint = () if options.shared else ("--shared unloads one that is for all tenants",)
            raise CommandFailed(f"not known: {options.adapter_id}", *hint)
    print(f"unloaded {options.adapter_id}")
    return 0
