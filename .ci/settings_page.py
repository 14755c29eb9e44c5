"""Writes docs/settings.md from the declarations of the settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from service.config import Config, all_settings
from service.settings import Setting

_HEAD = """# Settings

`make stubs` writes this page from the declarations in [service/config.py](../service/config.py) and of the
extensions.

Each setting is a flag of `quire serve` (`--max-batch-tokens 1024`), an environment variable
(`QUIRE_MAX_BATCH_TOKENS=1024`), and a line of the TOML file that `--config` or QUIRE_CONFIG names
(`max_batch_tokens = 1024`). A flag wins over the environment, and that over the file. `quire serve --check`
says which are given, and what is wrong with them ([serving.md](serving.md#settings)).
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_lines(), ""])


def _lines() -> Iterator[str]:
    for setting in all_settings().values():
        if setting.group:
            extension = "" if setting.owner is Config else " (extension)"
            yield f"\n## {setting.group[0].upper()}{setting.group[1:]}{extension}\n"
            yield "| setting | default | |"
            yield "|---|---|---|"
        yield f"| `{setting.name}` | {_default(setting)} | {_escaped(setting.help)}; {setting.allowed} |"


def _default(setting: Setting) -> str:
    return "" if setting.default == "" else f"`{setting.default_text}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
