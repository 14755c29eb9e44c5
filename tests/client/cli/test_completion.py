"""`quire completion`: with the script, bash completes the client's commands, the server's, and values."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from quire.cli.main import main

# What bash does when a key is pressed after the words; the last one may be unfinished.
PRESS = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p quire | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
"$function" quire "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell]) == 0
    path = directory / f"quire.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("quire st", ["status"]),
        ("quire pool ", ["init"]),
        ("quire serve --tls-k", ["--tls-key"]),
        ("quire status --wi", ["--wide"]),
        ("quire serve --device ", ["auto", "cpu", "cuda"]),
        ("quire completion ", ["bash", "fish", "zsh"]),
        ("quire serve --tokens tok", ["tokens.toml"]),
        ("quire adapters load sql ad", ["adapter"]),
        ("quire caches release --a", ["--all"]),
    ],
)
def test_bash_completes(
    words: str, offered: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    path = script("bash", tmp_path, capsys)
    files = tmp_path / "files"
    (files / "adapter").mkdir(parents=True)
    (files / "tokens.toml").touch()
    done = subprocess.run(
        [bash, "--norc", "-c", PRESS, "bash", str(path), *words.split(" ")],
        capture_output=True, text=True, timeout=60, cwd=files,
    )  # fmt: skip
    assert not done.stderr
    found = {line.strip().rstrip("/") for line in done.stdout.splitlines()} - {""}
    assert found - {"-h", "--help"} == set(offered)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_understands_its_script(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_TOKEN", "hunter2")
    path = script(shell, tmp_path, capsys)
    text = path.read_text()
    assert "hunter2" not in text
    for known in ("journal", "heartbeat", "generate"):
        assert known in text
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n", str(path)], check=True, timeout=60)
