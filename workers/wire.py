"""Converts messages of the worker protocol to operations, and results to messages."""

from __future__ import annotations

import dataclasses
import functools
import time
import zlib
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from quire.v1 import types_pb2

from workers.adapters.slots import LoraAdapterMetrics
from workers.common import worker_pb2
from workers.common.unknown_fields import unknown_field
from workers.decodes import (
    ARRIVED_NS,
    BATCH_ITEMS,
    CALLER,
    CHOSEN,
    COMPUTE_NS,
    DEADLINE,
    LORA_SLOT,
    NEVER,
    OP_ID,
    POSITION,
    PRELAUNCH,
    PROMPT_LEN,
    QUEUE_NS,
    SEQUENCE,
    TOKEN,
    WIDTH,
    Decodes,
)
from workers.executors.info import Capabilities, ExecutorStatus
from workers.given_experts import ONE_BYTE_EXPERTS, GivenExperts
from workers.kv.table import PoolUsage
from workers.kv_disk import DiskUsage
from workers.models.text import ModelText
from workers.operations import (
    Abort,
    Accept,
    AdapterLoaded,
    AdapterSource,
    Adopt,
    Adopted,
    ChangeAdapters,
    CheckIntegrity,
    Claim,
    Command,
    Done,
    Failed,
    FailureReason,
    Fork,
    Forward,
    Kind,
    Priority,
    Release,
    ReplaceStep,
    ReplaceWeights,
    Truncate,
    WeightsRead,
)
from workers.outputs import (
    GREEDY,
    DataType,
    DraftProbabilities,
    HiddenSpec,
    OutputSpec,
    RowChoice,
    RowOutput,
    Sampling,
    TokenMask,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    # Not at runtime: it needs torch, which a worker loads when its devices are chosen.
    from workers.models.model import ModelDescription

# More tokens than any vocabulary has.
_MAX_VOCABULARY = 1 << 22
# The cache of decoded options: how many, and up to which encoded size.
_CACHED_OPTIONS = 4096
_MAX_CACHED_BYTES = 256

# The numbers of each row of a DecodesCommand: those of `Decodes` up to the deadline, then the seed.
_SEED = DEADLINE + 1
_DECODE_NUMBERS = _SEED + 1
_LONGEST_NS = 1 << 62
# `prelaunch` is less than this in a row: what is more is the index of the options.
_PRELAUNCH_VALUES = 256
# Those of each row of a DecodesDone.
_DONE = [OP_ID, CHOSEN, QUEUE_NS, COMPUTE_NS, BATCH_ITEMS]


class ModelSizes(NamedTuple):
    """The sizes of a model, against which commands are checked.

    Attributes:
        moe_layers: How many layers have experts.
        num_experts: Those of each.
        experts_per_token: Those of a token.
    """

    vocab_size: int = _MAX_VOCABULARY
    num_layers: int = 0
    moe_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0


UNKNOWN_SIZES = ModelSizes()

_KINDS = {worker_pb2.OperationKind.Value(f"OPERATION_KIND_{kind.name}"): kind for kind in Kind}
_PRIORITIES = {types_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL} | {
    types_pb2.Priority.Value(f"PRIORITY_{priority.name}"): priority for priority in Priority
}
_DTYPES = {dtype: types_pb2.DataType.Value(f"DATA_TYPE_{dtype.name}") for dtype in DataType}
_KNOWN_DTYPES = {number: dtype for dtype, number in _DTYPES.items()}
_DTYPES_BY_NAME = {"float32": DataType.F32, "bfloat16": DataType.BF16, "float16": DataType.F16}
_OUTPUT_FIELDS = {field.name for field in dataclasses.fields(OutputSpec)}
_SAMPLING_FIELDS = {field.name for field in dataclasses.fields(Sampling)}
_REASONS = {
    reason: worker_pb2.WorkerErrorReason.Value(f"WORKER_ERROR_REASON_{reason.name}")
    for reason in FailureReason
}


def to_command(  # noqa: PLR0911 - one for each command
    message: worker_pb2.WorkerCommand, sizes: ModelSizes = UNKNOWN_SIZES
) -> Command:
    """Decodes a command. The server itself handles snapshots that are not ordered.

    Raises ValueError for an unknown command, for a mask of more tokens than the vocabulary has (without
    decoding it), for hidden states of other layers, and for given experts that are not of the model's shape.
    """
    op_id = message.op_id
    match message.WhichOneof("command"):
        case "forward":
            return _to_forward(op_id, message.forward, sizes)
        case "fork":
            return Fork(op_id, message.fork.sequence, tuple(message.fork.children))
        case "truncate":
            return Truncate(op_id, message.truncate.sequence, message.truncate.new_len)
        case "release":
            return Release(op_id, tuple(message.release.sequences))
        case "abort":
            return Abort(op_id, message.abort.target_op_id)
        case "snapshot":
            return CheckIntegrity(op_id, message.snapshot.check_integrity)
        case "adopt":
            items = message.adopt.items
            return Adopt(op_id, [Claim(item.sequence, item.length, item.digest) for item in items])
        case "adapter":
            return _to_change(op_id, message.adapter)
        case "replace_weights":
            replace = message.replace_weights
            step = ReplaceStep[str(replace.WhichOneof("step")).upper()]
            return ReplaceWeights(op_id, step, replace.read, replace.keep_sequences)
        case kind:
            raise ValueError(f"unknown command {kind}")


def to_decodes(
    message: worker_pb2.DecodesCommand, sizes: ModelSizes
) -> tuple[Decodes, list[worker_pb2.WorkerCommand]]:
    """Decodes plain decodes. Those whose options need more are returned as a command for each.

    Raises ValueError for rows of another size, or an unknown index of options.
    """
    rows = np.frombuffer(message.rows, "<u8").reshape(-1, _DECODE_NUMBERS).T
    options, which = list(message.options), (rows[PRELAUNCH] // _PRELAUNCH_VALUES).tolist()
    if max(which) >= len(options):
        raise ValueError(f"options {max(which)} of {len(options)}")
    known, draws = zip(*map(_plain_output, options, repeat(sizes)), strict=True)
    outputs: list[OutputSpec | None]
    if any(draws):
        # Draws without a seed use that of the cache, so that each row has an output of its own.
        outputs = [
            _plain_draw(options[index], seed, sizes) if draws[index] else known[index]
            for index, seed in zip(which, rows[_SEED].tolist(), strict=True)
        ]
    else:
        outputs = list(map(known.__getitem__, which))
    now_ns = time.monotonic_ns()
    columns = np.zeros((WIDTH, len(outputs)), np.int64)
    columns[:_SEED] = rows[:_SEED]
    columns[LORA_SLOT] = -1
    columns[PRELAUNCH] %= _PRELAUNCH_VALUES
    columns[ARRIVED_NS] = now_ns
    timeouts = np.minimum(rows[DEADLINE], _LONGEST_NS).astype(np.int64)
    columns[DEADLINE] = np.where(timeouts > 0, now_ns + timeouts, NEVER)
    plain = [output for output in outputs if output is not None]
    if len(plain) == len(outputs):
        return Decodes(columns, plain), []
    is_plain = np.array([output is not None for output in outputs])
    others = [_command_of(row, options) for row in rows.T[~is_plain].tolist()]
    return Decodes(columns[:, is_plain], plain), others


class UnknownFieldError(ValueError):
    """Options of a forward have a field that this code does not know: that of a gateway is newer.

    Attributes:
        field: Its path, which ends with its number, or with its name if the protos have it.
    """

    def __init__(self, field: str) -> None:
        super().__init__(f"unknown field {field}")
        self.field = field


def op_ids_of(message: worker_pb2.WorkerCommand) -> list[int]:
    """Of the operations in a command, which may be malformed: those that can be read."""
    if message.WhichOneof("command") != "decodes":
        return [message.op_id]
    numbers = np.frombuffer(message.decodes.rows[: len(message.decodes.rows) // 8 * 8], "<u8")
    op_ids: list[int] = numbers[OP_ID::_DECODE_NUMBERS].tolist()
    return op_ids


def _command_of(row: list[int], options: Sequence[bytes]) -> worker_pb2.WorkerCommand:
    """A row of a DecodesCommand as a command of its own."""
    forward = worker_pb2.ForwardCommand(
        sequence=row[SEQUENCE],
        caller=row[CALLER],
        position=row[POSITION],
        token_ids=[row[TOKEN]],
        prompt_len=row[PROMPT_LEN],
        options=options[row[PRELAUNCH] // _PRELAUNCH_VALUES],
        prelaunch=row[PRELAUNCH] % _PRELAUNCH_VALUES,
        timeout_ns=row[DEADLINE],
        default_seed=row[_SEED],
        kind=worker_pb2.OPERATION_KIND_DECODE,
        priority=types_pb2.PRIORITY_NORMAL,
    )
    return worker_pb2.WorkerCommand(op_id=row[OP_ID], forward=forward)


@functools.lru_cache(_CACHED_OPTIONS)
def _plain_output(data: bytes, sizes: ModelSizes) -> tuple[OutputSpec | None, bool]:
    """The output of a plain decode with these options, and whether it draws with the seed of the cache.

    None: they need more, or are wrong, which the command of each row that has them then says.
    """
    try:
        found = _cached_options(data, False, sizes)
        if found is None:
            return None, False
        options, draws = found
        forward = Forward(0, 0, 1, (0,), kind=Kind.DECODE, **options)
    except Exception:  # whatever is wrong with these, other rows of the message are right
        return None, False
    return (forward.output, draws) if forward.is_plain else (None, False)


@functools.lru_cache(_CACHED_OPTIONS)
def _plain_draw(data: bytes, seed: int, sizes: ModelSizes) -> OutputSpec | None:
    """The same with the seed of a cache. Options of more caches than this remembers are not parsed again."""
    output, _ = _plain_output(data, sizes)
    return None if output is None else _seeded(output, seed)


def _seeded(output: OutputSpec, seed: int) -> OutputSpec:
    assert output.sampling is not None, "it draws"
    return dataclasses.replace(output, sampling=dataclasses.replace(output.sampling, seed=seed))


def _to_forward(op_id: int, message: worker_pb2.ForwardCommand, sizes: ModelSizes) -> Forward:
    now_ns, data, keep_all = time.monotonic_ns(), message.options, message.keep_all
    found = _cached_options(data, keep_all, sizes) if len(data) <= _MAX_CACHED_BYTES else None
    options, draws = found or _to_options(_parsed(data), keep_all, sizes)
    if draws:
        options = options | {"output": _seeded(options["output"], message.default_seed)}
    return Forward(
        op_id=op_id,
        sequence=message.sequence,
        position=message.position,
        token_ids=list(message.token_ids),
        kind=_KINDS[message.kind],
        caller=message.caller,
        prompt_len=message.prompt_len,
        ephemeral=message.ephemeral,
        salt=message.salt if options["experts"] is None else options["experts"].salted(message.salt),
        adapter=message.adapter,
        priority=_PRIORITIES[message.priority],
        deadline_ns=now_ns + message.timeout_ns if message.timeout_ns else None,
        arrived_ns=now_ns,
        prelaunch=message.prelaunch,
        **options,
    )


def _to_change(op_id: int, message: worker_pb2.AdapterCommand) -> ChangeAdapters:
    """Raises ValueError if not one adapter is to be loaded now."""
    if message.load and len(message.added) != 1:
        raise ValueError(f"{len(message.added)} adapters to load")
    added = [
        AdapterSource(source.adapter, source.directory, source.digest, source.pinned)
        for source in message.added
    ]
    return ChangeAdapters(op_id, added, list(message.removed), message.load, message.all)


@functools.lru_cache(_CACHED_OPTIONS)
def _cached_options(data: bytes, keep_all: bool, sizes: ModelSizes) -> tuple[dict[str, Any], bool] | None:
    """None for options with masks. They are not cached: decoded they may be far larger than encoded."""
    options = _parsed(data)
    if options.output.HasField("mask") or options.verify_rows:
        return None
    return _to_options(options, keep_all, sizes)


def _to_options(
    options: worker_pb2.ForwardOptions, keep_all: bool, sizes: ModelSizes
) -> tuple[dict[str, Any], bool]:
    """The fields of a Forward that its options set, and whether it draws with the seed of its cache.

    Forwards with equal options may share the fields. Raises UnknownFieldError for one of the protos alone.
    """
    output = options.output
    draws = output.HasField("sampling") and not output.sampling.HasField("seed")
    ends = frozenset(options.end_token_ids)
    fields = {
        "rows": options.rows,
        "scored": options.scored,
        "output": _to_output(output, sizes, ends),
        "accept": Accept.CHOSEN if options.accept and not keep_all else Accept.ALL,
        "choices": [_to_choice(row, sizes.vocab_size) for row in options.verify_rows],
        "sample_seeds": tuple(options.sample_seeds),
        "parents": tuple(options.parents),
        "draft_tokens": options.draft_tokens,
        "experts": _to_experts(options, sizes) if options.experts else None,
    }
    return fields, draws


def _parsed(data: bytes) -> worker_pb2.ForwardOptions:
    """Raises UnknownFieldError if there is a field that the protos do not have: it would be ignored."""
    options = worker_pb2.ForwardOptions.FromString(data)
    if field := unknown_field(options):
        raise UnknownFieldError(field)
    return options


def _to_experts(options: worker_pb2.ForwardOptions, sizes: ModelSizes) -> GivenExperts:
    """The gateway has checked them. Raises ValueError if they do not fit the model."""
    ids = np.frombuffer(options.experts, dtype="u1" if sizes.num_experts <= ONE_BYTE_EXPERTS else "<u2")
    if ids.max(initial=0) >= sizes.num_experts:
        raise ValueError(f"expert {ids.max()} of {sizes.num_experts}")
    return GivenExperts(options.experts_from, ids.reshape(-1, sizes.moe_layers, sizes.experts_per_token))


def _to_output(
    message: types_pb2.OutputOptions, sizes: ModelSizes, end_token_ids: frozenset[int]
) -> OutputSpec:
    for field, _ in message.ListFields():
        if field.name not in _OUTPUT_FIELDS:
            raise UnknownFieldError(f"output.{field.name}")
    output = OutputSpec(
        logits=_KNOWN_DTYPES[message.logits] if message.logits else None,
        top_logprobs=message.top_logprobs,
        logprob_token_ids=tuple(message.logprob_token_ids),
        logprob=message.logprob,
        sampled_logprob=message.sampled_logprob,
        experts=message.experts,
        entropy=message.entropy,
        sampling=_to_sampling(message.sampling) if message.HasField("sampling") else None,
        mask=_to_mask(message.mask, sizes.vocab_size) if message.HasField("mask") else None,
        hidden=_to_hidden(message.hidden, sizes.num_layers) if message.HasField("hidden") else None,
        end_token_ids=end_token_ids,
    )
    return GREEDY if output == GREEDY else output


def _to_hidden(message: types_pb2.HiddenStates, num_layers: int) -> HiddenSpec:
    """No layers mean the last one. Raises ValueError for a layer that the model does not have."""
    layers = tuple(message.layers) or (num_layers,)
    if max(layers) > num_layers:
        raise ValueError(f"hidden states of layers {layers} of {num_layers}")
    number_format = _KNOWN_DTYPES[message.dtype] if message.dtype else DataType.F32
    return HiddenSpec(layers, number_format, message.mean)


def _to_sampling(message: types_pb2.SamplingParams) -> Sampling:
    """Unset fields keep the defaults of `Sampling`, which have no effect."""
    given = {field.name: value for field, value in message.ListFields()}
    if not given.keys() <= _SAMPLING_FIELDS:
        raise UnknownFieldError(f"output.sampling.{next(iter(given.keys() - _SAMPLING_FIELDS))}")
    return Sampling(**given | {"logit_bias": dict(message.logit_bias)})


def _to_choice(message: types_pb2.VerifyRow, vocab_size: int) -> RowChoice:
    return RowChoice(
        mask=_to_mask(message.mask, vocab_size) if message.HasField("mask") else None,
        draft=_to_draft(message.draft) if message.HasField("draft") else None,
    )


def _to_draft(message: types_pb2.DraftProbabilities) -> DraftProbabilities:
    """The gateway has checked them. They are scaled so that their sum is 1 despite rounding."""
    if message.dense:
        ids, probabilities = None, np.frombuffer(message.dense, dtype="<f4").astype(np.float64)
    else:
        ids = np.fromiter(message.token_ids, dtype=np.int64, count=len(message.token_ids))
        probabilities = np.fromiter(message.probabilities, dtype=np.float64, count=len(ids))
        order = np.argsort(ids)
        ids, probabilities = ids[order], probabilities[order]
    return DraftProbabilities(ids, probabilities / probabilities.sum())


def _to_mask(message: types_pb2.TokenMask, vocab_size: int) -> TokenMask:
    """Converts any encoding of a mask to bits once, since every row of every step reads it.

    The gateway has checked it. Raises ValueError for more tokens than the vocabulary has.
    """
    kind, max_bytes = message.WhichOneof("kind"), (vocab_size + 31) // 32 * 4
    if kind in ("packed", "deflated"):
        packed = _inflated(message.deflated, max_bytes + 1) if kind == "deflated" else message.packed
        if len(packed) > max_bytes:
            raise ValueError(f"a mask of {len(packed)} bytes for {vocab_size} tokens")
        return TokenMask(packed=packed)
    ids = message.forbidden.ids if kind == "forbidden" else message.allowed.ids
    if len(ids) > vocab_size:
        raise ValueError(f"a mask of {len(ids)} tokens of {vocab_size}")
    listed = np.fromiter(ids, dtype=np.int64, count=len(ids))
    listed = listed[listed < vocab_size]
    if kind == "forbidden":
        allowed = np.ones(vocab_size, dtype=np.bool_)
        allowed[listed] = False
    else:
        allowed = np.zeros(listed.max(initial=0) + 1, dtype=np.bool_)  # missing bits mean forbidden
        allowed[listed] = True
    return TokenMask(packed=np.packbits(allowed, bitorder="little").tobytes())


def _inflated(deflated: bytes, max_bytes: int) -> bytes:
    """The first `max_bytes` of a zlib stream. Raises ValueError if it is not one."""
    try:
        return zlib.decompressobj().decompress(deflated, max_bytes)
    except zlib.error as error:
        raise ValueError(f"a mask that is no zlib stream: {error}") from None


def to_event(  # noqa: PLR0911 - one for each result
    result: Forward | Decodes | Done | Failed | Adopted | AdapterLoaded | WeightsRead,
) -> worker_pb2.WorkerEvent:
    """Encodes a result."""
    match result:
        case Decodes():
            rows = np.ascontiguousarray(result.columns[_DONE].T, "<i8").tobytes()
            outputs = map(_row, result.row_outputs or ())
            return worker_pb2.WorkerEvent(decodes=worker_pb2.DecodesDone(rows=rows, outputs=outputs))
        case Forward():
            return worker_pb2.WorkerEvent(op_id=result.op_id, forward=_forward_done(result))
        case Done():
            return worker_pb2.WorkerEvent(op_id=result.op_id, done=worker_pb2.ControlDone())
        case Adopted():
            return worker_pb2.WorkerEvent(op_id=result.op_id, adopted=worker_pb2.Adopted(kept=result.kept))
        case AdapterLoaded():
            loaded = worker_pb2.AdapterLoaded(rank=result.rank, size_bytes=result.size_bytes)
            return worker_pb2.WorkerEvent(op_id=result.op_id, adapter_loaded=loaded)
        case WeightsRead():
            read = worker_pb2.WeightsRead(model=_description(result.model))
            return worker_pb2.WorkerEvent(op_id=result.op_id, weights_read=read)
        case Failed():
            error = worker_pb2.WorkerError(
                reason=_REASONS[result.reason],  # type: ignore[arg-type]  # an enum to the stubs
                detail=result.detail,
                pages_needed=result.pages_needed,
                pages_available=result.pages_available,
            )
            return worker_pb2.WorkerEvent(op_id=result.op_id, error=error)


def _forward_done(result: Forward) -> worker_pb2.ForwardDone:
    return worker_pb2.ForwardDone(
        outputs=map(_row, result.outputs),
        kept=result.kept,
        reused_tokens=result.reused,
        timing=types_pb2.StepTiming(
            queue_ns=result.queue_ns,
            compute_ns=result.compute_ns,
            steps=result.steps,
            batch_items=result.batch_items,
        ),
        token_logprobs=result.token_logprobs,
        token_is_argmax=result.token_is_argmax,
        samples=map(_sample, result.samples),
        kept_path=result.kept_path,
        appended=result.appended,
        draft_token_ids=result.drafts,
    )


def _sample(row: RowOutput) -> types_pb2.SampledToken:
    return types_pb2.SampledToken(
        token_id=row.token_id, logprob=row.logprob, sampled_logprob=row.sampled_logprob
    )


def _row(row: RowOutput) -> types_pb2.StepOutput:
    message = types_pb2.StepOutput(
        token_id=row.token_id,
        logprob=row.logprob,
        sampled_logprob=row.sampled_logprob,
        entropy=row.entropy,
    )
    if row.top_ids:
        message.top.token_ids.extend(row.top_ids)
        message.top.logprobs.extend(row.top_logprobs)
    if row.chosen_logprobs:
        message.chosen_logprobs.extend(row.chosen_logprobs)
    if row.logits is not None and row.logits_format is not None:
        _write_row(row.logits, row.logits_format, message.logits)
    if row.experts:
        message.experts = row.experts
    if row.hidden_format is not None:
        for states in row.hidden:
            _write_row(states, row.hidden_format, message.hidden.add())
    return message


def _write_row(data: bytes, number_format: DataType, into: types_pb2.Tensor) -> None:
    into.dtype = _DTYPES[number_format]  # type: ignore[assignment]  # an enum to the stubs
    into.shape.append(len(data) // (4 if number_format is DataType.F32 else 2))
    into.data = data


def _description(model: ModelDescription, pooling: str = "") -> types_pb2.ModelDescription:
    dtype = _DTYPES_BY_NAME.get(model.dtype)
    fields = _fields(model) | {"dtype": None if dtype is None else _DTYPES[dtype]}
    del fields["rounds_rows"]  # `Capabilities.products` says it
    return types_pb2.ModelDescription(**fields, pooling=pooling)


def to_ready(
    model: ModelDescription,
    capabilities: Capabilities,
    pool: PoolUsage,
    *,
    pid: int,
    text: ModelText,
    max_batch_tokens: int,
    max_batch_items: int,
    holdings: Sequence[tuple[int, int]],
) -> worker_pb2.WorkerReady:
    """Describes a worker that can serve. `holdings`: the sequences that it has, with their lengths."""
    defaults: Any = text.sampling_defaults
    return worker_pb2.WorkerReady(
        pid=pid,
        model=_description(model, text.pooling),
        tokenizer_json=text.tokenizer_json,
        chat_template=types_pb2.ChatTemplate(**_fields(text.chat_template)),
        sampling_defaults=types_pb2.SamplingParams(**defaults) if defaults else None,
        executor=types_pb2.ExecutorCapabilities(
            **_fields(capabilities), max_batch_tokens=max_batch_tokens, max_batch_items=max_batch_items
        ),
        pages_total=pool.pages_total,
        holdings=[worker_pb2.Holding(sequence=number, length=length) for number, length in holdings],
    )


def to_snapshot(
    pool: PoolUsage,
    status: ExecutorStatus,
    *,
    operations_in_flight: int,
    memory_bytes: int,
    intact: bool | None,
    lora_adapters: Sequence[LoraAdapterMetrics] = (),
    kv_disk: DiskUsage | None = None,
) -> worker_pb2.WorkerSnapshot:
    """Encodes the metrics of a worker."""
    of_status = _fields(status) | {"counts": types_pb2.StepCounts(**_fields(status.counts))}
    return worker_pb2.WorkerSnapshot(
        **of_status,
        pool=types_pb2.PoolUsage(**_fields(pool)),
        operations_in_flight=operations_in_flight,
        memory_bytes=memory_bytes,
        pool_intact=intact,
        lora_adapters=[types_pb2.LoraAdapterMetrics(**_fields(adapter)) for adapter in lora_adapters],
        kv_disk=None if kv_disk is None else types_pb2.KvDiskUsage(**_fields(kv_disk)),
    )


def _fields(record: DataclassInstance) -> dict[str, Any]:
    """The fields of a dataclass by name. The messages have fields of the same names."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
