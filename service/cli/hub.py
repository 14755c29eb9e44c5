"""Finds the files of a model that is named as on the Hugging Face hub: in the local cache, else on the hub.

What is in the cache and whole is taken as it is: nobody is asked whether there is something newer. Of a model
on the hub only what it is served from is fetched: settings, tokenizer, templates, and weights as safetensors;
and what names its licence. Never pickles, and never code. Environment variables of the hub's own library
count: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from service.config import other_format
from service.printable import escaped

# Read when the library is first imported: others are told which model is wanted, and nothing of who wants it.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

_CONFIG = "config.json"
_SMALL = (
    _CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip
# Told to callers; a model without is whole.
_CARDS = ("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt")
_MAX_CARD_BYTES = 1 << 20
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# An index needs about 100 bytes a tensor.
_MAX_INDEX_BYTES = 32 << 20
_MAX_REASON_CHARACTERS = 300
_WANTS_TOKEN = (401, 403)


class HubError(Exception):
    """A model cannot be had. The message is one line, which says why and what to do."""


def find_model(
    hub_id: str, revision: str | None, *, download: bool, on_progress: Callable[[float], None] | None = None
) -> Path:
    """The directory that holds a model: in the local cache, after a download if it is not there.

    Args:
        hub_id: ORG/NAME, checked.
        revision: A commit, branch or tag, checked; None: the main branch.
        download: Whether it may be downloaded. Progress goes to standard error,
        on_progress: or here: how much of the weights is there, from 0 to 1.

    Raises:
        HubError: It is not there, and cannot be downloaded or may not be.
    """
    from huggingface_hub import constants

    cached, matter = _look_in_cache(hub_id, revision)
    if cached is not None:
        return cached
    if not download or constants.is_offline_mode():
        why_not = "HF_HUB_OFFLINE is set" if download else "model_download is off"
        first = _download_command(hub_id, revision)
        raise HubError(f"{_named(hub_id, revision)} is no directory here and {matter}; {why_not}: {first}")
    try:
        return _download(hub_id, revision, on_progress)
    except Exception as error:
        # Beside its own errors, the library lets those of its HTTP client through.
        raise _explained(error, hub_id, revision) from error


def _look_in_cache(hub_id: str, revision: str | None) -> tuple[Path | None, str]:
    """The snapshot in the local cache if it is whole; else what is the matter. Raises HubError."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    where = f"in the cache {constants.HF_HUB_CACHE}"
    try:
        # Without their weights, whose names are not known yet.
        found = snapshot_download(
            hub_id, revision=revision, local_files_only=True, allow_patterns=list(_SMALL)
        )
    except IncompleteSnapshotError:
        return None, f"is not whole {where}, some of its settings are missing"
    except LocalEntryNotFoundError:
        return None, f"is not {where}"
    except OSError as error:
        return None, f"cannot be read {where}: {error.strerror}"
    missing = _first_missing(Path(found))
    return (Path(found), "") if missing is None else (None, f"is not whole {where}, {missing} is missing")


def _first_missing(directory: Path) -> str | None:
    """The first file that a model needs and the directory lacks. Raises HubError for a bad index."""
    needed = [_CONFIG]
    if (directory / _WEIGHTS).is_file() or not (directory / _INDEX).is_file():
        needed.append(_WEIGHTS)
    else:
        needed += _shards(directory / _INDEX)
    return next((name for name in needed if not (directory / name).is_file()), None)


def _shards(index: Path) -> list[str]:
    """The files that an index names. Raises HubError."""
    try:
        with index.open("rb") as file:
            names = set(json.loads(file.read(_MAX_INDEX_BYTES))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise HubError(f"{index}: is no index of weights") from None
    for name in names:
        # It lies beside the index, is what it should be, and can be shown: an index may say anything.
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not (name.isprintable() and name.endswith(".safetensors"))
        ):
            raise HubError(f"{index}: must name safetensors beside it, got {escaped(repr(name))[:100]}")
    return sorted(names)


def _download(hub_id: str, revision: str | None, on_progress: Callable[[float], None] | None) -> Path:
    """Fetches what the cache lacks of a model. Raises HubError, and whatever the library does."""
    from huggingface_hub import HfApi, hf_hub_download

    info = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    _check_can_be_served(hub_id, sizes)
    # By the revision's name, so that the cache knows it by that; the rest is of the same commit.
    directory = Path(hf_hub_download(hub_id, _CONFIG, revision=revision)).parent
    index = () if _WEIGHTS in sizes else (_INDEX,)
    wanted = (*_SMALL[1:], *index)
    for name, size_bytes in sizes.items():
        is_card = name in _CARDS and size_bytes <= _MAX_CARD_BYTES
        if is_card or any(fnmatchcase(name, pattern) for pattern in wanted):
            hf_hub_download(hub_id, name, revision=directory.name)
    weights = _shards(directory / _INDEX) if index else [_WEIGHTS]
    total_bytes = sum(sizes.get(name, 0) for name in weights)
    _tell(f"downloading {_named(hub_id, revision)} from {_host()}: {total_bytes / 1e6:,.0f} MB")
    done_bytes = 0
    for name in weights:
        progress = _progress()
        if on_progress is not None:
            from service.cli.progress_lines import progress_parts

            progress = progress_parts(done_bytes, total_bytes, on_progress)
        hf_hub_download(hub_id, name, revision=directory.name, tqdm_class=progress)
        done_bytes += sizes.get(name, 0)
    return directory


def _check_can_be_served(hub_id: str, sizes: Mapping[str, int]) -> None:
    """Raises HubError for files that are no model which can be served, before any of them is fetched."""
    if _CONFIG not in sizes:
        said = other_format(sizes) or f"it has no {_CONFIG}"
        raise HubError(f"{hub_id} cannot be served: {said}")
    if _WEIGHTS in sizes or _INDEX in sizes:
        return
    if any(name.endswith(_PICKLES) for name in sizes):
        raise HubError(
            f"{hub_id} cannot be served: its weights are pickles only, which run code when they are loaded;"
            " look for a --model-revision with safetensors, such as refs/pr/N, or for another model"
        )
    said = other_format(sizes) or f"it has neither {_WEIGHTS} nor {_INDEX}"
    raise HubError(f"{hub_id} cannot be served: {said}")


def _explained(error: Exception, hub_id: str, revision: str | None) -> HubError:
    """What a failed download means for whoever asked for it."""
    from huggingface_hub import errors

    named, host = _named(hub_id, revision), _host()
    match error:
        case HubError():
            return error
        case errors.GatedRepoError():
            said = f"is gated: accept its terms on {host}, and set HF_TOKEN to a token of yours"
        case errors.RepositoryNotFoundError():
            said = (
                f"is no directory here, and not on {host}; or it is private: then set HF_TOKEN to a token"
                " that may read it"
            )
        case errors.RevisionNotFoundError():
            said = f"is not on {host}: the model has no such revision"
        case errors.HfHubHTTPError():
            said = f"cannot be downloaded: {host} answered {error.response.status_code}"
            if error.response.status_code in _WANTS_TOKEN:
                said += ", so HF_TOKEN must be a token that may read it"
        case OSError(strerror=str(why)):  # no room on the disk, say
            said = f"cannot be downloaded: {error.filename or ''} {why}"
        case _:
            why = escaped(str(error).partition("\n")[0])[:_MAX_REASON_CHARACTERS] or type(error).__name__
            first = _download_command(hub_id, revision)
            said = f"is not whole in the cache, and cannot be downloaded from {host}: {why}; {first}"
    return HubError(f"{named} {said}")


def _named(hub_id: str, revision: str | None) -> str:
    return hub_id if revision is None else f"{hub_id} at {revision}"


def _download_command(hub_id: str, revision: str | None) -> str:
    """What to do where this process fetches nothing: the command comes with the hub's library."""
    where = "" if revision is None else f" --revision {revision}"
    return f"download it first (hf download {hub_id}{where}), or name a directory that holds it"


def _host() -> str:
    from huggingface_hub import constants

    return escaped(urlsplit(constants.ENDPOINT).netloc or constants.ENDPOINT)


def _progress() -> Any:
    """How the library shows a file's progress: its own bars on a terminal, elsewhere lines."""
    if sys.stderr.isatty():
        return None
    from service.cli.progress_lines import ProgressLines

    return ProgressLines


def _tell(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr, flush=True)
