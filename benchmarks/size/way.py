"""The files and types on the path of a Decode, from the arguments and writes of functions that run for one.

A file counts if one of its functions takes a value of one of `TYPES`, or several of them, as an argument, or
sets attributes of one. Methods of these types themselves do not make a file count, and neither do models,
runners, kernels and the client. Functions count that run for a Decode that goes well; others are not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.checkout import ROOT
from benchmarks.size.calls import Use

# In the order in which a Decode meets them.
TYPES = (
    "quire.v1.executor_pb2.DecodeRequest",
    "service.caches.requests.Append",
    "service.caches.entries.Operation",
    "service.caches.entries.CacheEntry",
    "service.caches.ledger.CacheState",
    "workers.common.worker_pb2.DecodesCommand",
    "workers.decodes.Decodes",
    "workers.models.inputs.ForwardInputs",
    "service.caches.answers.DecodeDone",
    "service.caches.records.TokensAppended",
    "service.caches.requests.Appended",
    "quire.v1.executor_pb2.DecodeResponse",
)
_NOT_COUNTED = ("workers/models/", "workers/runners/", "kernels/", "clients/")


@dataclass(frozen=True, slots=True)
class Way:
    """The path through the gateway and the worker."""

    # For each file, the types of the path that it takes or changes.
    files: dict[str, set[str]]
    # The types in `TYPES` that were found.
    types: set[str]
    # Wrappers: our other types that each Decode instantiates. Only those with an `__init__` in Python.
    other_types: set[str]


def way_of(uses: Iterable[Use]) -> Way:
    """Computes the path from the trace of a Decode."""
    uses = list(uses)
    types = {use.type for use in uses if use.type in TYPES}
    # Class methods too, which have no `self`.
    own_methods = {
        (use.file, use.function)
        for use in uses
        if use.type in TYPES and use.function.startswith(f"{use.type.rpartition('.')[2]}.")
    }
    files: defaultdict[str, set[str]] = defaultdict(set)
    for use in uses:
        name = use.file.removeprefix(f"{ROOT}/")
        is_ours = name.startswith(("service/", "workers/")) and not name.startswith(_NOT_COUNTED)
        if is_ours and use.type in TYPES and (use.file, use.function) not in own_methods:
            files[name].add(use.type)
    made = {use.type for use in uses if use.variable == "self" and use.function.endswith("__init__")}
    return Way(dict(sorted(files.items())), types, made - set(TYPES))
