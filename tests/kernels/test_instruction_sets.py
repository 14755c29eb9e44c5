"""Which instruction set the compiled kernels use, and how a lower one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quire.v1.worker_pb2 import WorkerConfig

from kernels.cpu import library
from tests.kernels.instruction_sets import instructions_used
from workers.__main__ import EXIT_CONFIG, _make_executor, report
from workers.models.errors import ModelError

AVX2, AVX512 = library._V3_FLAGS, library._V4_FLAGS
Choose = Callable[[str | None, frozenset[str]], None]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Choose]:
    """Sets QUIRE_CPU_ISA, or takes it away, on a CPU with these flags."""

    def choose(name: str | None, flags: frozenset[str]) -> None:
        cpu_info = tmp_path / "cpuinfo"
        cpu_info.write_text(f"flags : fpu {' '.join(flags)}\n")
        monkeypatch.setattr(library, "_CPU_INFO", cpu_info)
        monkeypatch.delenv(library.VARIABLE, raising=False)
        if name is not None:
            monkeypatch.setenv(library.VARIABLE, name)
        forget()

    def forget() -> None:
        library.instruction_set.cache_clear()
        library.load.cache_clear()

    yield choose
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    ("asked", "flags", "used"),
    [
        (None, AVX512 | {"avx512_bf16"}, "avx512bf16"),
        (None, AVX512, "avx512"),
        (None, AVX2, "avx2"),
        (None, frozenset[str](), None),
        ("avx512", AVX512 | {"avx512_bf16"}, "avx512"),
        ("avx2", AVX512, "avx2"),
        ("none", AVX512, None),
    ],
)
def test_the_best_one_or_a_lower_one_that_is_asked_for(
    asked: str | None, flags: frozenset[str], used: str | None, choose: Choose
) -> None:
    choose(asked, flags)
    found = library.instruction_set()
    assert (found.name if found else None) == used


def test_without_compiled_kernels_on_request(choose: Choose, capsys: pytest.CaptureFixture[str]) -> None:
    choose("none", AVX2)
    assert not library.available()
    library.main()
    assert "plain torch will be used: QUIRE_CPU_ISA = none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("avx512bf16", "QUIRE_CPU_ISA = avx512bf16: this CPU lacks avx512_bf16, avx512bw, avx512cd, "),
        ("AVX2", "QUIRE_CPU_ISA = AVX2: must be one of avx512bf16, avx512, avx2, none"),
        ("", "QUIRE_CPU_ISA = : must be one of avx512bf16, avx512, avx2, none"),
    ],
)
def test_another_one_is_refused_before_anything_runs(
    asked: str, said: str, choose: Choose, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the kernels are built, and by a worker, which is not started again."""
    choose(asked, AVX2)
    with pytest.raises(SystemExit, match=said):
        library.main()
    with pytest.raises(ModelError, match=said) as refused:
        _make_executor(WorkerConfig(model="paged-attention", threads=1, device="cpu"), lambda *_: None)
    assert report(refused.value, "paged-attention") == EXIT_CONFIG


def test_a_skipped_test_names_what_the_cpu_lacks(choose: Choose) -> None:
    choose(None, AVX512)
    with pytest.raises(pytest.skip.Exception, match="for avx512bf16: this CPU lacks avx512_bf16"):
        instructions_used("avx512bf16")
    choose("none", AVX512)
    with pytest.raises(pytest.skip.Exception, match="for avx2: QUIRE_CPU_ISA is none"):
        instructions_used()
