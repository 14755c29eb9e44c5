"""The compiled attention of the CPU against float64, its fallback, and its build."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import paged_attention as module
from kernels.attention_batch import AttentionBatch
from kernels.cpu import library
from kernels.cpu import paged_attention as cpu
from tests.kernels.attention_features import FEATURES
from tests.kernels.instruction_sets import instructions_used, need_compiled
from tests.kernels.test_paged_attention import Case, make_case

DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compiled kernels, built here if they are not yet."""
    need_compiled()


@pytest.fixture
def unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without a build."""
    monkeypatch.setattr(library, "BUILD_DIR", tmp_path / "build")
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch, compiled: None) -> None:
    """Fail where the reference would stand in for the kernel."""

    def refuse(*_: object) -> None:
        raise AssertionError("not computed by the kernel")

    monkeypatch.setattr(module, "paged_attention_reference", refuse)


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 40, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_of_every_length_around_a_page(dtype: torch.dtype, window: int | None) -> None:
    lengths = (0, 1, 2, 15, 16, 17, 31, 32, 33, 100, 511, 512, 513, 1100)
    make_case([(1, length) for length in lengths], dtype=dtype).check(window)


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("width", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_shapes(dtype: torch.dtype, width: int, group_size: int) -> None:
    items = [(1, 20), (1, 33), (3, 18), (5, 5), (16, 40), (0, 7), (2, 0)]
    make_case(items, heads=2 * group_size, width=width, dtype=dtype).check(scale=width**-0.5)


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("window", [None, 1, 5, 16, 33, 520])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_to_verify(dtype: torch.dtype, window: int | None) -> None:
    items = [(length, start + length) for length in (2, 5, 15, 16) for start in (0, 1, 15, 16, 17, 505, 512)]
    make_case(items, dtype=dtype).check(window)


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("window", [None, 1, 17, 520])
@pytest.mark.parametrize("features", FEATURES, ids="+".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_features(dtype: torch.dtype, features: list[str], window: int | None) -> None:
    """Contexts of one chunk of keys and of several, which are merged."""
    items = [*((1, length) for length in (0, 1, 16, 17, 512, 513, 1100)), (3, 18), (16, 16), (5, 700)]
    make_case(items, heads=6, dtype=dtype, features=features).check(window)


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("features", [[], *FEATURES], ids="+".join)
@pytest.mark.parametrize(("width", "value_width"), [(192, 128), (16, 256), (256, 16), (80, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_of_different_widths(
    dtype: torch.dtype, width: int, value_width: int, features: list[str]
) -> None:
    items = [(1, 20), (1, 600), (3, 18), (1, 0), (16, 35)]
    case = make_case(items, width=width, value_width=value_width, dtype=dtype, features=features)
    case.check(scale=width**-0.5)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_chunks_beside_decodes(dtype: torch.dtype) -> None:
    make_case([(1, 30), (40, 50), (1, 0), (17, 17), (16, 16)], dtype=dtype).check()


@pytest.fixture
def chunks(request: pytest.FixtureRequest, compiled: None) -> None:
    """Long items too; they are left to torch where the compiled attention of them has no AVX512-BF16."""
    if library.has_function("quire_chunk_attention_bf16"):
        request.getfixturevalue("no_torch")


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("window", [None, 1, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("start", [0, 1, 15, 16, 63, 64, 65, 130])
def test_chunks_that_start_anywhere(start: int, window: int | None) -> None:
    make_case([(length, start + length) for length in (17, 33, 64, 70)], dtype=torch.bfloat16).check(window)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
def test_head_shapes_of_chunks(width: int, group_size: int) -> None:
    items = [(1, 20), (40, 75), (16, 40), (0, 7), (20, 0), (101, 101)]
    make_case(items, heads=2 * group_size, width=width, dtype=torch.bfloat16).check(scale=width**-0.5)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("window", [None, 1, 65])
@pytest.mark.parametrize("features", FEATURES, ids="+".join)
def test_features_of_chunks(features: list[str], window: int | None) -> None:
    items = [(17, 17), (33, 64), (70, 200), (20, 0), (5, 40)]
    make_case(items, heads=6, dtype=torch.bfloat16, features=features).check(window)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("features", [[], *FEATURES], ids="+".join)
@pytest.mark.parametrize(("width", "value_width"), [(192, 128), (32, 256), (256, 32), (96, 64)])
def test_different_widths_of_chunks(width: int, value_width: int, features: list[str]) -> None:
    items = [(40, 75), (1, 30), (101, 101)]
    case = make_case(items, width=width, value_width=value_width, dtype=torch.bfloat16, features=features)
    case.check(scale=width**-0.5)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("features", [[], *FEATURES], ids="+".join)
def test_bits_of_a_chunk_depend_on_nothing_beside_it(features: list[str]) -> None:
    case = make_case([(40, 300), (20, 20)], dtype=torch.bfloat16, features=features)
    together = case.run()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(case.run(), together)
    finally:
        torch.set_num_threads(threads)
    batch = case.batch
    case.batch = AttentionBatch(
        batch.page_tables[:1], batch.query_starts[:2], batch.context_lens[:1], [40], [300]
    )
    case.query = case.query[:40]
    assert torch.equal(case.run(), together[:40])


@pytest.mark.usefixtures("chunks")
def test_large_scores_of_chunks_do_not_overflow() -> None:
    case = make_case([(40, 600)], dtype=torch.bfloat16)
    case.query.mul_(1000)
    assert torch.isfinite(case.run()).all()


@pytest.mark.usefixtures("no_torch")
def test_large_scores_do_not_overflow() -> None:
    case = make_case([(1, 600), (5, 40)])
    case.query.mul_(1000)
    assert torch.isfinite(case.run()).all()


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("features", [[], *FEATURES], ids="+".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_depend_on_its_sequence_only(dtype: torch.dtype, features: list[str]) -> None:
    """Alone or among others, with one thread or several, decoded or verified: the same bits."""
    items = [(4, 1100), (1, 33), (16, 700), (3, 90)]
    case = make_case(items, width=128, value_width=64, dtype=dtype, features=features)
    together = case.run()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(case.run(), together)
    finally:
        torch.set_num_threads(threads)
    row = 0
    for index, (query_len, context) in enumerate(items):
        for token in range(query_len):
            alone = Case(
                case.query[row : row + 1],
                case.k_pages,
                case.v_pages,
                AttentionBatch(
                    case.batch.page_tables[index : index + 1],
                    torch.tensor([0, 1], dtype=torch.int32),
                    torch.tensor([context - query_len + token + 1], dtype=torch.int32),
                    [1],
                    [context - query_len + token + 1],
                ),
                [],
                [],
                case.scoring,
            )
            assert torch.equal(alone.run()[0], together[row])
            row += 1


@pytest.mark.usefixtures("compiled")
def test_wide_indices() -> None:
    case = make_case([(1, 20), (3, 18)])
    expected = case.run()
    batch = case.batch
    wide = AttentionBatch(
        batch.page_tables.long(),
        batch.query_starts.long(),
        batch.context_lens.long(),
        batch.query_lens,
        batch.context_lens_host,
    )
    case.batch = wide
    assert torch.equal(case.run(), expected)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("width", "value_width", "dtype"),
    [
        (40, 40, torch.float32),
        (272, 272, torch.bfloat16),
        (64, 64, torch.float16),
        (24, 16, torch.float32),
        (16, 24, torch.float32),
    ],
)
def test_other_shapes_and_dtypes_are_left_to_torch(width: int, value_width: int, dtype: torch.dtype) -> None:
    case = make_case([(1, 20), (3, 18)], width=width, value_width=value_width, dtype=dtype)
    assert not cpu.can_attend(case.query, case.k_pages, case.v_pages, case.batch)
    case.check(scale=width**-0.5)


@pytest.mark.usefixtures("unavailable")
def test_without_a_build_torch_stands_in() -> None:
    assert not library.available()
    assert library.kernel_name() is None
    for features in [[], *FEATURES]:
        items = [(1, 20), (3, 18), (1, 0), (40, 50)]
        make_case(items, dtype=torch.bfloat16, features=features).check()


@pytest.mark.usefixtures("unavailable")
def test_a_damaged_build_is_not_used() -> None:
    instructions = instructions_used()
    library.BUILD_DIR.mkdir()
    (library.BUILD_DIR / f"{library._prefix(instructions)}-0.so").write_bytes(b"not a library")
    assert not library.available()


@pytest.mark.usefixtures("compiled")
def test_a_build_for_another_cpu_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text("flags : fpu sse2\n")
    monkeypatch.setattr(library, "_CPU_INFO", cpu_info)
    monkeypatch.delenv(library.VARIABLE, raising=False)
    library.instruction_set.cache_clear()
    library.load.cache_clear()
    try:
        assert library.instruction_set() is None and not library.available()
        with pytest.raises(library.BuildError, match="AVX2"):
            library.build()
    finally:
        library.instruction_set.cache_clear()
        library.load.cache_clear()


@pytest.mark.usefixtures("unavailable")
def test_building_needs_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instructions_used()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    library.main()
    assert "plain torch will be used: /no/such/compiler" in capsys.readouterr().err
    assert not library.BUILD_DIR.exists()
