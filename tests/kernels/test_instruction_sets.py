"""Which instruction set the compiled kernels use, how a lower one is asked for, and what there is without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels.cpu import library
from kernels.paged_attention import paged_attention
from tests import isa
from tests.kernels.attention_case import FEATURES, make_case
from tests.kernels.instruction_sets import instructions_used, need_compiled
from workers.common.protocol import EXIT_CONFIG
from workers.common.worker_pb2 import WorkerConfig
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.errors import ModelError
from workers.process import _make_executor, report

AVX2, AVX512 = library._V3_FLAGS, library._V4_FLAGS
AVX512BF16 = library._AVX512_BF16_FLAGS
AMX = AVX512BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
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
        (None, AMX, "amx"),
        (None, AVX512BF16, "avx512bf16"),
        (None, AVX512 | {"avx512_bf16"}, "avx512"),
        (None, AVX512, "avx512"),
        (None, AVX2, "avx2"),
        (None, frozenset[str](), None),
        ("avx512bf16", AMX, "avx512bf16"),
        ("avx512", AVX512BF16, "avx512"),
        ("avx2", AVX512, "avx2"),
        ("none", AVX512, None),
    ],
)
def test_the_best_one_or_a_lower_one_that_is_asked_for(
    asked: str | None,
    flags: frozenset[str],
    used: str | None,
    choose: Choose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "_may_use_tiles", lambda: True)
    choose(asked, flags)
    found = library.instruction_set()
    assert (found.name if found else None) == used


def test_any_x86_cpu_emulates_each(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in library.X86_SETS[:-1]:
        for variable, value in isa.emulated(known.name).items():
            monkeypatch.setenv(variable, value)
        choose(known.name, AVX2)
        found = library.instruction_set()
        assert found is not None and found.name == f"emulated-{known.name}"
        assert library.multiplies_bfloat16() == ("avx512_bf16" in known.cpu_flags)


def test_amx_is_not_used_where_linux_refuses_its_tiles(
    choose: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "amx_tile" not in library.cpu_flags():
        assert not library._may_use_tiles()
    monkeypatch.setattr(library, "_may_use_tiles", lambda: False)
    choose(None, AMX)
    found = library.instruction_set()
    assert found is not None and found.name == "avx512bf16"
    choose("amx", AMX)
    with pytest.raises(library.InstructionSetError, match="QUIRE_CPU_ISA = amx: this machine lacks amx_tile"):
        library.instruction_set()


@pytest.mark.parametrize("best", library.X86_SETS)
def test_each_one_is_tested_on_any_x86_cpu(best: library.InstructionSet) -> None:
    """By `make test`, which uses the best, or by `make test-isa`, natively or emulated."""
    names = [name.removeprefix("emulated-") for name, _, _ in isa.settings(set(best.cpu_flags))]
    assert {known.name for known in library.X86_SETS} <= {best.name, *names}
    assert len(set(names)) == len(names)


# `make kernels` compiles those of this CPU, and test_amx.py those of products with AMX. avx512bf16 has no
# source that amx does not have.
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["amx", "avx512"])
def test_the_sources_compile_for_a_cpu_that_is_not_here(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need_compiled()
    named = next(known for known in library.INSTRUCTION_SETS if known.name == name)
    monkeypatch.setattr(library, "instruction_set", lambda: named)
    monkeypatch.setattr(library, "BUILD_DIR", tmp_path / "build")
    quick = tuple("-O0" if flag == "-O3" else flag for flag in library._FLAGS)
    monkeypatch.setattr(library, "_FLAGS", (*quick, "-Werror"))
    assert library.build().exists()


def test_without_compiled_kernels_on_request(choose: Choose, capsys: pytest.CaptureFixture[str]) -> None:
    choose("none", AVX2)
    assert not library.available()
    library.main()
    assert "plain torch will be used: QUIRE_CPU_ISA = none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("avx512bf16", "QUIRE_CPU_ISA = avx512bf16: this machine lacks avx512_bf16, avx512_vnni, avx512bw, "),
        ("AVX2", "QUIRE_CPU_ISA = AVX2: must be one of amx, avx512bf16, avx512, avx2, neon, none"),
        ("", "QUIRE_CPU_ISA = : must be one of amx, avx512bf16, avx512, avx2, neon, none"),
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
    assert report(refused.value) == EXIT_CONFIG


def test_a_skipped_test_names_what_the_cpu_lacks(choose: Choose) -> None:
    choose(None, frozenset(("sse4_2",)))
    with pytest.raises(pytest.skip.Exception, match="this CPU has neither AVX2 nor NEON"):
        instructions_used()
    choose("none", AVX512)
    with pytest.raises(pytest.skip.Exception, match="QUIRE_CPU_ISA is none"):
        instructions_used()


@pytest.fixture
def unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without a build."""
    monkeypatch.setattr(library, "BUILD_DIR", tmp_path / "build")
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.usefixtures("unavailable")
def test_without_a_build_torch_stands_in() -> None:
    assert not library.available() and library.kernel_name() is None
    kv = KvTensors([LayerKv(2, 16, 16)], num_pages=2, page_size=16, dtype=torch.bfloat16)
    assert isinstance(kv.layer(0)[0], torch.Tensor)
    for features in ((), *FEATURES):
        case = make_case([(1, 20), (3, 18), (1, 0), (40, 50)], dtype=torch.bfloat16, features=features)
        told = {name: getattr(case.scoring, name) for name in features}
        out = paged_attention(
            case.query, case.k_pages, case.v_pages, case.batch, scale=case.scoring.scale, **told
        )
        case.check(out)


@pytest.mark.usefixtures("unavailable")
def test_a_damaged_build_is_not_used() -> None:
    instructions = instructions_used()
    library.BUILD_DIR.mkdir()
    (library.BUILD_DIR / f"{library.file_prefix(instructions)}-0.so").write_bytes(b"not a library")
    assert not library.available()


@pytest.mark.usefixtures("unavailable")
def test_a_build_of_this_machine_comes_before_a_prebuilt_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(command: list[str]) -> str:
        if "-o" in command:
            Path(command[-1]).touch()
        return "a version"

    monkeypatch.setattr(library, "_run", compiler)
    monkeypatch.setenv("CXX", "a compiler")
    monkeypatch.setattr("ctypes.CDLL", str)
    prebuilt = library.BUILD_DIR / f"{library.file_prefix(instructions_used())}-prebuilt.so"
    library.BUILD_DIR.mkdir()
    prebuilt.touch()
    assert str(library.load()) == str(prebuilt)
    built = library.build()
    library.load.cache_clear()
    assert str(library.load()) == str(built) != str(prebuilt)


def test_a_build_for_another_cpu_is_not_loaded(choose: Choose) -> None:
    choose(None, frozenset({"sse2"}))
    assert library.instruction_set() is None and not library.available()
    with pytest.raises(library.BuildError, match="AVX2"):
        library.build()


@pytest.mark.usefixtures("unavailable")
def test_building_needs_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instructions_used()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    library.main()
    assert "plain torch will be used: /no/such/compiler" in capsys.readouterr().err
    assert not library.BUILD_DIR.exists()
