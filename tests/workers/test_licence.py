"""What a directory says of its licence: told as it stands there, and harmless whatever it holds."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.models.licence import MAX_CHARACTERS, read_licence

LINK = "https://example.org/LICENSE"


def card(directory: Path, front: str, rest: str = "# A model\n\nlicense: not this\n") -> Path:
    (directory / "README.md").write_text(f"---\n{front}\n---\n{rest}")
    return directory


@pytest.mark.parametrize(
    ("front", "said"),
    [
        ("license: apache-2.0", "apache-2.0"),
        ('tags: [a]\nlicense: "mit"\nlanguage: en', "mit"),
        ("license: 'mit'  # as ever", "mit"),
        ("license: mit # as ever", "mit"),
        (f"license: other\nlicense_name: own\nlicense_link: {LINK}", f"own ({LINK})"),
        ("license: other\nlicense_name: own", "own"),
        (f"license_link: {LINK}", LINK),
        ("license: other", "other"),
        ("license: apache-2.0\nlicense_name: own", "apache-2.0"),
        ("base:\n  license: nested", ""),
        ("license: |\n  text", ""),
        ("license: {a: b}", ""),
        ("license: [mit, 'cc-by-4.0']", ""),
        ("license:\n- mit", ""),
        ("license: &anchor mit\nlicense_name: *anchor", ""),
        ("license:", ""),
        ("license: null", ""),
        ("license: ~\nlicense_name: own", "own"),
        ("licenses: mit", ""),
    ],
)
def test_front_matter(tmp_path: Path, front: str, said: str) -> None:
    assert read_licence(card(tmp_path, front)) == said


@pytest.mark.parametrize(
    "text",
    [
        "",
        "license: mit",
        "---",
        "---\nlicense: mit",
        "# x\n---\nlicense: mit\n---\n",
        "----\nlicense: mit\n---\n",
    ],
)
def test_what_is_no_front_matter_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    assert read_licence(tmp_path) == ""


def test_other_line_ends_and_marks(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(b"\xef\xbb\xbf---\r\nlicense: mit\r\n---\r\n")
    assert read_licence(tmp_path) == "mit"


def test_a_licence_file_is_named_where_the_card_says_nothing(tmp_path: Path) -> None:
    assert read_licence(tmp_path) == ""
    (tmp_path / "config.json").touch()
    for name in ("LICENSE.txt", "LICENSE"):
        (tmp_path / name).touch()
        assert read_licence(tmp_path) == name
    assert read_licence(card(tmp_path, "license: mit")) == "mit"


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    """A FIFO would hold a worker for ever."""
    os.mkfifo(tmp_path / "README.md")
    assert read_licence(tmp_path) == ""
    (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").symlink_to("/etc/passwd")
    assert read_licence(tmp_path) == ""
    (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").mkdir()
    assert read_licence(tmp_path) == ""
    assert read_licence(tmp_path / "nowhere") == ""


def test_of_a_large_card_a_part_is_read(tmp_path: Path) -> None:
    assert read_licence(card(tmp_path, "license: mit", "x" * (4 << 20))) == "mit"
    assert read_licence(card(tmp_path, "a: b\n" * (1 << 20) + "license: mit")) == ""


def test_control_characters_and_lengths_are_harmless(tmp_path: Path) -> None:
    said = read_licence(card(tmp_path, "license: \x1b[31mred\x07 \N{SNOWMAN}"))
    assert said == "?[31mred? ?"
    assert len(read_licence(card(tmp_path, "license: " + "x" * 5000))) == MAX_CHARACTERS


@given(st.binary(max_size=200), st.integers(0, 1 << 32))
def test_any_bytes_are_harmless(tmp_path_factory: pytest.TempPathFactory, content: bytes, seed: int) -> None:
    directory = tmp_path_factory.mktemp("card")
    pieces = [
        b"---\n",
        b"license:",
        b"license_name:",
        b"license_link:",
        b"- ",
        b"[",
        b"]",
        b"\n",
        b"'",
        b'"',
        content,
    ]
    dice = random.Random(seed)
    (directory / "README.md").write_bytes(b"---\n" + b"".join(dice.choices(pieces, k=12)))
    said = read_licence(directory)
    assert len(said) <= MAX_CHARACTERS and said.isascii() and (said.isprintable() or not said)
