"""Writes docs/settings.md from the declarations of the settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from service.config import Config, all_settings
from service.settings import Setting

_HEAD = """# Settings

Each setting is a flag of `quire serve` (`--max-batch-tokens 1024`), an environment variable
(`QUIRE_MAX_BATCH_TOKENS=1024`), and a line of the TOML file that `--config` or QUIRE_CONFIG names
(`max_batch_tokens = 1024`). Flags override the environment, which overrides the file. `quire serve --check`
prints those that are set, and what is wrong ([serving.md](serving.md#settings)). `make stubs` writes
this page from [service/config.py](../service/config.py) and the extensions.
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
        allowed = "" if setting.is_switch else f"; {setting.allowed}"
        yield f"| `{setting.name}` | {_default(setting)} | {_escaped(setting.help + allowed)} |"


def _default(setting: Setting) -> str:
    return "" if setting.default == "" else f"`{setting.default_text}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
