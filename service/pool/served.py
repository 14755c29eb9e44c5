"""Which weights a gateway serves, written down for the one after it: `weights.json` in the data directory.

Without the file those are served that the settings name. It is written once others were loaded, before
anything is computed with them. It does not know workers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from service import durable_file
from service.logging import get_logger

_log = get_logger(__name__)
_NAME = "weights.json"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, instead of what the settings name."""

    # As the settings named it when the weights were loaded: whoever names another wants that.
    configured: str
    # What is loaded: a directory, or the name of an executor without weights.
    model: str
    # Grows with each set of weights that is served here.
    weights: int = 0


class ServedFile:
    """Owner of the file. Without a directory nothing is kept."""

    def __init__(self, data_dir: Path | None) -> None:
        self._path = None if data_dir is None else data_dir / _NAME

    @property
    def is_kept(self) -> bool:
        """Whether what is written is there for the next gateway."""
        return self._path is not None

    def read(self) -> Served | None:
        """What was written last; None: nothing, or nothing that can be used. Raises nothing."""
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                content = json.loads(file.read(_MAX_BYTES))
            served = Served(**content)
            if [type(value) for value in asdict(served).values()] != [str, str, int]:
                raise TypeError("a field is not what it should be")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            _log.warning("cannot tell which weights were loaded", path=str(self._path), error=str(error))
            return None
        return served

    def write(self, served: Served) -> None:
        """From now on these are served. Blocks on the disk. Raises OSError: nothing has changed."""
        if self._path is None:
            return
        durable_file.write(self._path, json.dumps(asdict(served)))


def choose(written: Served | None, configured: str, in_journal: int) -> Served:
    """What to serve: what was loaded last, unless the settings name something else than they did then.

    `in_journal`: the highest weights that the journal knows of.
    """
    if written is not None and written.weights >= in_journal:
        if configured in (written.configured, written.model):
            return replace(written, configured=configured)
        return Served(configured, configured, written.weights)
    # The first time; or somebody has removed the file.
    return Served(configured, configured, in_journal)


def to_mark(fingerprint: str, weights: int) -> str:
    """How a journal is told of which model its newest caches are."""
    return f"{fingerprint}#{weights}" if weights else fingerprint


def from_mark(mark: str | None) -> tuple[str | None, int]:
    """What `to_mark` was given; None and 0: nothing was."""
    fingerprint, _, weights = (mark or "").partition("#")
    return (None if mark is None else fingerprint), int(weights or 0)
