"""Plants a mistake in a worker, as `tests/planted_kv/__init__.py` says.

Python imports this at its start where this directory is on PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_WORKERS = (["workers.__main__"], ["tests.soak.marked", "worker"])
# Options of Python come before.
_program = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []

if "PLANTED_KV" in os.environ and any(_program[: len(each)] == each for each in _WORKERS):
    from tests.planted_kv import PLANTS

    def _replace(owner: Any, name: str, value: Any) -> None:
        assert hasattr(owner, name), f"a mistake would be planted where nothing is: {owner}.{name}"
        setattr(owner, name, value)

    PLANTS[os.environ["PLANTED_KV"]](_replace)
