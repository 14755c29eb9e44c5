"""Finds a model of the Hugging Face hub: in the local cache, or by a download.

A complete model in the cache is used without asking the hub for a newer revision. A download fetches only
what serving needs (config, tokenizer, chat templates, weights as safetensors); never pickles
or code. The environment variables of the hub's library apply: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE,
HF_TOKEN, HF_ENDPOINT.

Importing this module loads the hub's library, so import it only where a model of the hub is needed.
"""

from __future__ import annotations

import glob
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Set before the library is imported. The hub learns which model is requested, but gets no telemetry.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from huggingface_hub import HfApi, constants, errors, snapshot_download
from huggingface_hub.utils.tqdm import tqdm

from service.model_check import quantised
from service.model_names import other_format
from service.outbound import is_this_machine, proxy_of
from service.printable import escaped
from workers.common.model_files import OTHER_TOKENIZERS, SETTINGS
from workers.common.protocol import EXIT_CONFIG

_CONFIG = "config.json"
_SMALL = (*SETTINGS, "model.safetensors.index.json")
_WEIGHTS = "model*.safetensors"
# Files that are no model in this layout.
_NO_WEIGHTS = ("consolidated", "adapter_model")
_SHARD = re.compile(r"-of-(\d+)\.safetensors$", re.ASCII)
_GGUF = ".gguf"
_GGUF_SHARD = re.compile(r"-\d+-of-(\d+)\.gguf$", re.ASCII | re.IGNORECASE)
_GGUF_NAME = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*))(?:(?:-\d+-of-\d+)?\.gguf|/[^/]*\.gguf)",
    re.ASCII | re.IGNORECASE,
)
_PROJECTOR = "mmproj"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_REASON_CHARACTERS = 300
_MOST_NAMED = 30
_AUTH_STATUSES = (401, 403)
_STEP_PERCENT = 10


if is_this_machine(_HOST := urlsplit(constants.ENDPOINT).hostname or ""):
    # A mirror on this machine must not go through the proxies of the environment.
    _others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = f"{_others},{_HOST}" if _others else _HOST


class HubError(Exception):
    """A model is not available. The message is one line with the reason and what to do.

    `status`: the exit status of a server that needs the model.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def find_model(model: str, revision: str | None) -> Path:
    """Returns the model's directory or GGUF file in the local cache. Downloads it if necessary.

    Args:
        model: ORG/NAME, validated; or ORG/NAME:NAME for a GGUF file, see `gguf_files`.
        revision: A commit, branch or tag, validated; None: the main branch.

    Raises:
        HubError: It is not in the cache, and cannot or must not be downloaded.
    """
    hub_id, _, wanted = model.partition(":")
    cached, problem = _look_in_cache(hub_id, wanted, revision)
    if cached is not None:
        return cached
    if constants.is_offline_mode():
        raise _not_here(hub_id, revision, problem)
    try:
        return _download_gguf(hub_id, wanted, revision) if wanted else _download(hub_id, revision)
    except Exception as error:
        # The library raises its own errors and those of its HTTP client.
        raise _to_hub_error(error, hub_id, revision) from error


def _not_here(hub_id: str, revision: str | None, problem: str) -> HubError:
    """The error for a model that is not in the cache and must not be downloaded."""
    first = _download_command(hub_id, revision)
    text = f"{_named(hub_id, revision)} is no directory here and {problem}; HF_HUB_OFFLINE is set: {first}"
    return HubError(text)


def _look_in_cache(hub_id: str, wanted: str, revision: str | None) -> tuple[Path | None, str]:
    """The snapshot in the local cache if it is complete, or the first of its GGUF files named `wanted`.

    Otherwise None and the problem.
    """
    where = f"in the cache {constants.HF_HUB_CACHE}"
    patterns = [f"*{_GGUF}"] if wanted else [*_SMALL, _WEIGHTS]
    try:
        directory = Path(
            snapshot_download(hub_id, revision=revision, local_files_only=True, allow_patterns=patterns)
        )
    except errors.IncompleteSnapshotError as error:
        if not wanted:
            return None, f"is not whole {where}"
        # Maybe only other GGUF files are missing.
        directory = Path(error.snapshot_path or "")
    except errors.LocalEntryNotFoundError:
        return None, f"is not {where}"
    except OSError as error:
        return None, f"cannot be read {where}: {error.strerror}"
    if not wanted:
        return (directory, "") if _is_whole(directory) else (None, f"is not whole {where}")
    files = [path for path in directory.rglob(f"*{_GGUF}") if path.is_file()]
    chosen = gguf_files([path.relative_to(directory).as_posix() for path in files], wanted)
    if not chosen or len(chosen) < _count_of(chosen[0]):
        return None, f"has no whole {wanted} {where}"
    return directory / chosen[0], ""


def gguf_files(names: Iterable[str], wanted: str) -> list[str]:
    """The sorted GGUF files of a repository with a name, such as Q4_K_M. Empty: there are none.

    The name is the end of the file's name (before shard number and suffix), or its directory's name. Of
    several models the one with the shortest name is chosen.
    """
    ends = re.compile(rf"(.*[-._/]|){re.escape(wanted)}(-\d+-of-\d+)?\.gguf", re.IGNORECASE | re.ASCII)
    inside = re.compile(rf"(.*/)?{re.escape(wanted)}/[^/]*\.gguf", re.IGNORECASE)
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if not _is_projector(name) and (ends.fullmatch(name) or inside.fullmatch(name)):
            models.setdefault(_GGUF_SHARD.sub(_GGUF, name), []).append(name)
    return models[min(models, key=lambda model: (len(model), model))] if models else []


def _count_of(name: str) -> int:
    """The number of files of the model that this file belongs to."""
    found = _GGUF_SHARD.search(name)
    return 1 if found is None else int(found[1])


def _is_whole(directory: Path) -> bool:
    """Whether a snapshot has all files. The library checks this only for its own downloads."""
    weights = _weights(path.name for path in directory.glob("*.safetensors") if path.is_file())
    counts = [int(found[1]) for name in weights if (found := _SHARD.search(name)) is not None]
    return (directory / _CONFIG).is_file() and len(weights) >= max(counts, default=1)


def _weights(names: Iterable[str]) -> list[str]:
    """The weights in one or many files, not in directories; or else in the only file of another name."""
    files = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    usual = [name for name in files if fnmatchcase(name, _WEIGHTS)]
    others = [name for name in files if not name.startswith(_NO_WEIGHTS)]
    return usual or (others if len(others) == 1 else [])


def _download(hub_id: str, revision: str | None) -> Path:
    """Downloads the files that are missing in the cache. Raises HubError and the library's errors."""
    info = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    _check_can_be_served(hub_id, sizes)
    small = [*_SMALL, *(() if "tokenizer.json" in sizes else OTHER_TOKENIZERS)]
    hidden, weights = _progress(lambda _: None), _weights(sizes)
    # Named by the revision, so that the cache records that name. The weights are of the same commit.
    directory = Path(snapshot_download(hub_id, revision=revision, allow_patterns=small, tqdm_class=hidden))
    if problem := quantised(directory):
        raise HubError(f"{hub_id} cannot be served: {problem}", EXIT_CONFIG)
    total_bytes = sum(map(sizes.__getitem__, weights))
    _fetch(hub_id, revision, directory.name, [*map(glob.escape, weights)], total_bytes)
    return directory


def _download_gguf(hub_id: str, wanted: str, revision: str | None) -> Path:
    """As `_download`, for GGUF files. Returns the first one."""
    info = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    chosen = gguf_files(sizes, wanted)
    if not chosen:
        raise HubError(f"{hub_id} has no GGUF file {wanted}: {_gguf_names(sizes) or 'it has none at all'}")
    if len(chosen) < _count_of(chosen[0]):
        raise HubError(
            f"{hub_id} cannot be served: it has {len(chosen)} of {_count_of(chosen[0])} files of {wanted}"
        )
    total_bytes = sum(map(sizes.__getitem__, chosen))
    # Named by the revision, so that the cache records that name.
    patterns = [*map(glob.escape, chosen)]
    directory = _fetch(hub_id, revision, revision, patterns, total_bytes)
    return directory / chosen[0]


def _gguf_names(names: Iterable[str]) -> str:
    """The names of the GGUF files of a repository, as text for an error. Empty: none."""
    files = [name for name in names if name.endswith(_GGUF) and not _is_projector(name)]
    found = [(_GGUF_NAME.search(name), Path(_GGUF_SHARD.sub(_GGUF, name)).stem) for name in files]
    named = sorted({match[1].upper() if match else whole for match, whole in found})
    return f"it has {escaped(', '.join(named[:_MOST_NAMED]))}" if named else ""


def _is_projector(name: str) -> bool:
    """Whether a file is a model's multimodal projector."""
    return name.rpartition("/")[2].startswith(_PROJECTOR)


def _fetch(
    hub_id: str, revision: str | None, commit: str | None, patterns: Sequence[str], total_bytes: int
) -> Path:
    """Downloads the large files of a model at a commit or revision. Returns the directory."""
    _print(f"downloading {_named(hub_id, revision)} from {_host()}: {total_bytes / 1e6:,.0f} MB")
    # On a terminal the library shows its own progress bars.
    progress = None if sys.stderr.isatty() else _progress(_print_tenths(total_bytes))
    return Path(snapshot_download(hub_id, revision=commit, allow_patterns=[*patterns], tqdm_class=progress))


def _check_can_be_served(hub_id: str, sizes: Mapping[str, int]) -> None:
    """Raises HubError, before any download, if the files are not a model that can be served."""
    weights = _weights(sizes)
    if (found := _gguf_names(sizes)) and not weights:
        raise HubError(f"{hub_id} has GGUF files: name one of them, such as {hub_id}:Q4_K_M; {found}")
    if weights and _CONFIG in sizes:
        return
    problem = other_format(sizes) or f"it has no {_WEIGHTS if _CONFIG in sizes else _CONFIG}"
    if not weights and any(name.endswith(_PICKLES) for name in sizes):
        problem = (
            "its weights are pickles only, which run code when they are loaded; look for a --model-revision"
            " with safetensors, such as refs/pr/N, or `hf download` it and convert it as docs/models.md says"
        )
    raise HubError(f"{hub_id} cannot be served: {problem}")


def _to_hub_error(error: Exception, hub_id: str, revision: str | None) -> HubError:
    named, host = _named(hub_id, revision), _host()
    match error:
        case HubError():
            return error
        case errors.GatedRepoError():
            problem = f"is gated: accept its terms on {host}, and set HF_TOKEN to a token of yours"
        case errors.RepositoryNotFoundError():
            problem = (
                f"is no directory here, and not on {host}; or it is private: then set HF_TOKEN to a token"
                " that may read it"
            )
        case errors.RevisionNotFoundError():
            problem = f"is not on {host}: the model has no such revision"
        case errors.HfHubHTTPError():
            problem = f"cannot be downloaded: {host} answered {error.response.status_code}"
            if error.response.status_code in _AUTH_STATUSES:
                problem += ", so HF_TOKEN must be a token that may read it"
        case OSError(strerror=str(why)):  # such as a full disk
            problem = f"cannot be downloaded: {error.filename or ''} {why}"
        case _:
            why = escaped(str(error).partition("\n")[0])[:_MAX_REASON_CHARACTERS] or type(error).__name__
            if (proxy := proxy_of(constants.ENDPOINT)) is not None:
                host += f" through the proxy {proxy.address} of {proxy.variable}"
            first = _download_command(hub_id, revision)
            problem = (
                f"is missing or incomplete in the cache, and cannot be downloaded from {host}: {why}; {first}"
            )
    return HubError(f"{named} {problem}")


def _named(hub_id: str, revision: str | None) -> str:
    return hub_id if revision is None else f"{hub_id} at {revision}"


def _download_command(hub_id: str, revision: str | None) -> str:
    """The command that downloads a model. `hf` is part of the hub's library."""
    where = "" if revision is None else f" --revision {revision}"
    return f"download it first (hf download {hub_id}{where}), or name a directory that holds it"


def _host() -> str:
    return escaped(urlsplit(constants.ENDPOINT).netloc or constants.ENDPOINT)


def _print(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr, flush=True)


def _print_tenths(total_bytes: int) -> Callable[[int], None]:
    """Returns a function that prints a line to standard error for each tenth of a download."""
    printed = 0

    def report(done_bytes: int) -> None:
        nonlocal printed
        percent = 100 * done_bytes // max(total_bytes, 1) // _STEP_PERCENT * _STEP_PERCENT
        if percent > printed:
            printed = percent
            _print(f"{percent}% downloaded")

    return report


def _progress(report: Callable[[int], None]) -> Any:
    """A tqdm class that shows nothing, and reports the downloaded bytes of all files."""

    class Progress(tqdm):
        # Otherwise tqdm starts a thread that refreshes stalled bars.
        monitor_interval = 0

        def __init__(self, *args: Any, **settings: Any) -> None:
            # Other bars count files, or bytes of the network.
            self._has_bytes = settings.get("name") == "huggingface_hub.snapshot_download"
            shown = {"disable": False, "leave": False, "file": io.StringIO()}
            super().__init__(*args, **(settings | shown))  # type: ignore[no-untyped-call]

        def display(self, *_: object, **__: object) -> None:
            """Reports the progress. tqdm calls this from time to time, and at the end."""
            if self._has_bytes:
                report(int(self.n))

    return Progress
