"""What is compiled before a start is what a worker launches, and is found where it looks for it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.dry_run import Steps, launches_of
from benchmarks.gpu.launches import Device, Launch
from benchmarks.gpu.precompile import current_device, precompile
from kernels.cuda.variant import SHARED_BYTES, Variant
from tests import quire_command
from tests.gpu.sizes import FirstTiles, repeat_launches
from tests.kernels.conftest import INTERPRETED
from tests.kernels.cuda.test_decode_lora import SLOTS, make_adapter
from tests.kernels.cuda.test_decode_runner import FILTERED, PAGES, SETTINGS, VOCAB, random_decoder
from tests.kernels.cuda.test_lora_cuda import use_triton
from tests.kernels.tree_batches import Tree, with_trees
from tests.workers.packing import HandPacker, HandSequence, Item
from workers import device_sampling
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.experts import Experts
from workers.outputs import DraftProbabilities, Sampling, TokenMask
from workers.runners.cuda_graph import CudaGraphRunner
from workers.runners.eager import EagerRunner
from workers.sampling import Draft, SamplingRow

ROOT = Path(__file__).resolve().parents[3]
MAX_ROWS, MAX_RANK = 3, 6
# In the interpreter nothing launches early, and attention has the limits of an H100.
DEVICE = Device((8, 0), 132, SHARED_BYTES[90]) if INTERPRETED else None
MIXTRAL = SETTINGS | {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Launch]:
    """What is launched, by operations that take every tensor for one on a GPU.

    In the interpreter, which is slow, what a model launches computes zeros: only its choices are computed.
    """
    found: set[Launch] = set()
    launch = Variant.launch

    def note(variant: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
        found.add(one := Launch.of(variant, arguments))
        if INTERPRETED and ".sampling" not in one.module:
            arguments[0].zero_()
        else:
            launch(variant, grid, *arguments)

    monkeypatch.setattr(Variant, "launch", note)
    if INTERPRETED:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        use_triton(monkeypatch)
    return found


def plain_kv(device: str) -> KvTensors:
    """As on a GPU: nothing is packed. Kernels read what was not written, too."""
    return KvTensors(
        [LayerKv(2, 64, 64)] * 2,
        num_pages=PAGES,
        page_size=16,
        dtype=torch.float32,
        device=device,
        pack=False,
    )


def as_on_a_gpu(decoder: Decoder) -> Decoder:
    """Also what is only so there: experts in one tensor, without adapters; products fused unmeasured."""
    if INTERPRETED:
        decoder.fuse_few_rows(FirstTiles(lambda _: 0.0))
        for layer in decoder.layers:
            if isinstance(layer[-1].body, Experts):
                body: Any = layer[-1].body
                body.projections = lambda: iter(())
                body.gate_up, body.down = (
                    torch.stack([weight.plain for weight in weights]) for weights in (body.gate_up, body.down)
                )
    return decoder


def steps_of(decoder: Decoder, device: str) -> None:
    """Prompts, verifies of trees, decodes, all together, with and without adapters; graphs' launches too."""
    kv = plain_kv(device)
    packer = HandPacker(16, range(1, PAGES))
    eager = EagerRunner(decoder, kv)
    graphs = CudaGraphRunner(decoder, kv, max_rows=MAX_ROWS, max_seq_len=256, capture=repeat_launches)
    sequences = [HandSequence() for _ in range(4)]

    def step(items: Sequence[Item], spec: Sampling | None = None, tree: Tree | None = None) -> None:
        inputs = packer.pack(list(items))
        if tree is not None:
            trees = [*[None] * (len(items) - 1), tree]
            inputs = dataclasses.replace(inputs, attention=with_trees(inputs.attention, trees))
        rows = [SamplingRow(spec)] * len(inputs.wanted_rows)
        (eager if tree is not None else graphs).step(inputs, rows)

    for length, sequence in zip((1, 3, 16, 33), sequences, strict=True):
        step([Item(sequence, [token % VOCAB for token in range(length)])])
    for number in (1, 3, 4):
        step([Item(sequence, [1]) for sequence in sequences[:number]])
    step([Item(sequence, [1]) for sequence in sequences[:2]], FILTERED)
    step([Item(sequences[0], [1]), Item(sequences[1], [1, 2, 3]), Item(HandSequence(), range(20))])
    step([Item(sequences[2], [3]), Item(sequences[3], [1, 2, 3])], tree=Tree((0, 0)))


def choices_on(device: str) -> None:
    """All settings of sampling, for a row; for more, the same is launched."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    some = DraftProbabilities(np.array([1, 2]), np.array([0.5, 0.5]))
    for spec in (
        Sampling(),
        Sampling(temperature=1.0),
        FILTERED,
        Sampling(temperature=1.0, logit_bias={1: 1.0, 2: 2.0}),
        Sampling(temperature=1.0, top_p=0.5, repetition_penalty=1.2, frequency_penalty=0.1),
    ):
        for mask in (None, TokenMask(allowed=(1, 2, 3))):
            row = SamplingRow(spec, mask, history=[1, 2, 3], position=4)
            device_sampling.choose_tokens(logits, [row])
            device_sampling.sampled_logprobs(logits, [1], [row])
            drafted = SamplingRow(spec, mask, draft=Draft((1,), some), history=[1, 2], position=4)
            device_sampling.choose_with_drafts(logits, [drafted], [(1, 2)])


@pytest.mark.parametrize(
    ("settings", "batch_invariant"),
    [(SETTINGS, False), (MIXTRAL, True)],
    ids=["dense", "batch-invariant experts"],
)
def test_whatever_is_launched_is_compiled_before(
    settings: dict[str, object], batch_invariant: bool, device: str, launched: set[Launch]
) -> None:
    decoder = random_decoder(settings, device)
    decoder.batch_invariant = batch_invariant
    steps_of(as_on_a_gpu(decoder), device)
    if not batch_invariant:
        choices_on(device)
    decoder.allocate_lora(SLOTS, MAX_RANK)
    decoder.set_lora(1, decoder.pack_lora(make_adapter(decoder, 1)))
    packer = HandPacker(16, range(1, PAGES))
    runner, kv = EagerRunner, plain_kv(device)
    adapted = HandSequence(lora_slot=1)
    for tokens in ([1, 2, 3], [4], range(18)):
        runner(decoder, kv).step(packer.pack([Item(adapted, list(tokens))]), [SamplingRow()])
    ran = set(launched)
    steps = Steps(MAX_ROWS, 16, batch_invariant=batch_invariant, lora=(SLOTS, MAX_RANK))
    compiled = launches_of(decoder.config, torch.float32, steps, DEVICE or current_device())
    assert {one.kernel for one in ran} > {"prefill_kernel", "rope_kv_write_kernel", "shrink_kernel"}
    missing = sorted(map(repr, ran - compiled))
    assert not missing, "\n".join(missing)


def test_what_a_dry_run_changes_is_changed_back() -> None:
    before = Variant.launch
    config = random_decoder(SETTINGS, "cpu").config
    launches_of(config, torch.float32, Steps(2, 4), Device((9, 0), 132, SHARED_BYTES[90]))
    assert Variant.launch is before and not torch.ones(1).is_cuda


# Each part in a process of its own, which has the imports of this one.
COMPILE = """
import os
import sys
import torch
from triton.compiler.compiler import ASTSource
from benchmarks.gpu.launches import Launch, Pointer
from benchmarks.gpu.precompile import _NoDevice, _try_to_compile
from kernels.cuda import rms_norm, variant as variants
import triton

WIDTH = 1024
variant = rms_norm._norm(1, WIDTH, 0)
out, x, weight = (torch.empty(4 * WIDTH, dtype=torch.bfloat16)[:2 * WIDTH].view(2, WIDTH) for _ in range(3))
given = out, x, weight[0]
def arguments(x):
    sizes = {"token_stride": WIDTH, "head_stride": WIDTH, "rows": 2, "eps": 1e-6}
    tensors = {"out": out, "x": x, "weight": weight[0]}
    names = [name for name in variant.kernel.arg_names if name not in variant.constexprs_of(90)]
    return [(tensors | sizes)[name] for name in names]
variants.architecture_of = lambda _: 90

def compile():
    print(_try_to_compile(Launch.of(variant, arguments(x)), (9, 0)).error)
    unknown = Launch(rms_norm.__name__, "nothing", (), (), ())
    print(_try_to_compile(unknown, (9, 0)).error)

def find(major):
    triton.runtime.driver.set_active(_NoDevice((major, 0)))
    def refuse(*_):
        raise RuntimeError("it is compiled anew")
    ASTSource.make_ir = refuse
    shifted = torch.empty(4 * WIDTH, dtype=torch.bfloat16)[1:][: 2 * WIDTH].view(2, WIDTH)
    for given in (x, shifted):
        try:
            # As `kernel[grid](...)` calls it, but for the launch itself.
            options = variant.constexprs_of(90) | variant.options_of(90)
            variant.kernel.run(*arguments(given), grid=(1,), warmup=True, **options)
            print("found")
        except RuntimeError as error:
            print(error)

for part in (compile, lambda: find(9), lambda: find(8)):
    child = os.fork()
    if not child:
        part()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_later_process_finds_it(tmp_path: Path) -> None:
    """With the same code, from tensors: the key of the cache on disk is that of a launch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    (tmp_path / "compile_and_find.py").write_text(COMPILE)
    command = ["compile_and_find"]
    command = quire_command.module(*command) if INTERPRETED else [sys.executable, "-m", *command]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *("", "AttributeError: module 'kernels.cuda.rms_norm' has no attribute 'nothing'"),
        # Another alignment is another kernel, and so is another device.
        *("found", "it is compiled anew"),
        *["it is compiled anew"] * 2,
    ]


@pytest.mark.thorough
def test_all_of_a_model_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own. What is compiled is also checked by the compile gate, for more shapes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = ModelConfig.from_settings(SETTINGS)
    steps, h100 = Steps(4, 16, lora=(SLOTS, 16)), Device((9, 0), 132, SHARED_BYTES[90])
    done = [*precompile(config, torch.bfloat16, steps, h100, processes=2)]
    assert len(done) > 30 and not [each for each in done if each.error]
    again = [*precompile(config, torch.bfloat16, steps, h100, processes=2)]
    assert {each.name for each in again} == {each.name for each in done}
    assert len([*tmp_path.rglob("*.cubin")]) >= len({each.name for each in done})
