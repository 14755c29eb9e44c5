"""Random callers of a step loop with adapters, their operator, and gateways that come and go.

What callers get is compared with models that the adapter is merged into.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

from tests.commands import Abort, Adopt, ChangeAdapters, Claim, Command, Fork, Release
from tests.workers.adapted_steps import LONGEST_TOKENS, Adapted, Worker
from tests.workers.adapter_invariants import check_adapters
from workers.adoption import token_digest
from workers.common.worker_pb2 import WorkerEvent
from workers.kv.shared_list import TokenList
from workers.operations import (
    AdapterSource,
    Failed,
    FailureReason,
    Forward,
    HeldSequences,
    Kind,
    Reset,
    Result,
)

VOCABULARY = 97
# What callers name: each has a version, which is replaced now and then.
NAMES = 5
# Two correct computations in float32 are up to 1e-4 of the largest logit away from an exact one each
# (docs/models.md), so they may choose different tokens only where two logits are closer than this.
CLOSE = 2e-4


@dataclass(eq=False)
class Text:
    """A sequence as its caller knows it. `chosen`: after which token, and what."""

    number: int
    version: int
    tokens: list[int] = field(default_factory=list)
    chosen: list[tuple[int, int]] = field(default_factory=list)

    @property
    def salt(self) -> bytes:
        return b"%d" % self.version


class Callers:
    """Callers, an operator and a gateway, who act at random."""

    def __init__(self, adapted: Adapted, seed: int) -> None:
        self._adapted = adapted
        self._dice = dice = random.Random(seed)
        self.worker = Worker(adapted, dice)
        self._ids = 0
        self._prompts = [[dice.randrange(VOCABULARY) for _ in range(60)] for _ in range(2)]
        # Which adapter each version is that was ever there, and those that the worker knows.
        self._index = {0: 0}
        self._sources: dict[int, AdapterSource] = {}
        self._names: list[int] = [0] * NAMES
        self.texts: dict[int, Text] = {}
        self._asked: dict[int, tuple[Text, Forward]] = {}
        self._loads: dict[int, int] = {}
        self._finished: list[Text] = []
        self._adopting: set[int] | None = None
        self._commands: list[Command | Reset] = []
        self.answered = 0
        for name in range(NAMES):
            self._replace(name)

    # What they do.

    def act(self) -> None:
        """Some of it, and a round of the worker."""
        actions = {
            self._prefill: 8, self._decode: 24, self._abort: 2, self._release: 4, self._fork: 1,
            self._replace_any: 2, self._remove: 2, self._pin: 1, self._forget_prelaunched: 0.5,
            self._reset: 0.3, self.worker.read_one: 10, self._nothing: 8,
        }  # fmt: skip
        for action in self._dice.choices([*actions], [*actions.values()], k=self._dice.randint(1, 5)):
            action()
        self._round()

    def finish(self) -> None:
        """Nothing new comes, and all that was asked ends. Compares all texts."""
        for _ in range(100 + 20 * len(self._asked)):
            self._round()
            self.worker.read_one()
        assert not self._asked and not self._loads, "a forward never ended"
        check_adapters(self.worker.table)
        for text in (*self._finished, *self.texts.values()):
            self._compare(text)

    def _compare(self, text: Text) -> None:
        logits = self._adapted.logits(self._index[text.version], text.tokens)
        for at, token in text.chosen:
            away = float(logits[at].max() - logits[at, token])
            assert away < CLOSE * float(logits.abs().max()), "a token of another adapter"

    def _round(self) -> None:
        commands, self._commands = self._commands, []
        for result in self.worker.round(*commands):
            self._take(result)

    def _id(self) -> int:
        self._ids += 1
        return self._ids

    def _idle(self) -> list[Text]:
        busy = {text for text, _ in self._asked.values()}
        return [text for text in self.texts.values() if text not in busy and text.tokens]

    # Forwards.

    def _ask(self, text: Text, tokens: list[int], **settings: Any) -> None:
        if len(text.tokens) + len(tokens) > LONGEST_TOKENS:
            return
        forward = Forward(
            self._id(),
            text.number,
            len(text.tokens),
            tokens,
            salt=text.salt,
            adapter=text.version,
            caller=self._dice.randint(1, 3),
            prelaunch=self._dice.random() < 0.6,
            deadline_ns=1 if self._dice.random() < 0.02 else None,
            **settings,
        )
        self._asked[forward.op_id] = text, forward
        self._commands.append(forward)

    def _prefill(self) -> None:
        if len(self.texts) < 12:
            text = Text(self._id(), self._dice.choice([0, *self._names]))
            self.texts[text.number] = text
            shared = self._dice.choice(self._prompts)[: self._dice.randint(0, 60)]
            tokens = [*shared, self._dice.randrange(VOCABULARY)]
            self._ask(text, tokens, rows=self._dice.choice([1, len(tokens)]), prompt_len=len(tokens))

    def _decode(self) -> None:
        if idle := self._idle():
            text = self._dice.choice(idle)
            token = text.chosen[-1][1] if self._dice.random() < 0.9 else self._dice.randrange(VOCABULARY)
            self._ask(text, [token], kind=Kind.DECODE, prompt_len=text.chosen[0][0] + 1)

    def _abort(self) -> None:
        # What was prelaunched is answered at once: before an abort that follows it.
        sent = [op_id for op_id, (_, forward) in self._asked.items() if forward not in self._commands]
        if sent:
            op_id = self._dice.choice(sent)
            self._commands.append(Abort(self._id(), op_id))
            self._drop(op_id)

    def _drop(self, op_id: int) -> None:
        """Its sequence is as it was before: that of a prompt is not there."""
        text, forward = self._asked.pop(op_id)
        if not forward.position:
            del self.texts[text.number]

    def _release(self) -> None:
        if idle := self._idle():
            text = self._dice.choice(idle)
            self._commands.append(Release(self._id(), [text.number]))
            self._finished.append(self.texts.pop(text.number))

    def _fork(self) -> None:
        if (idle := self._idle()) and len(self.texts) < 12:
            text = self._dice.choice(idle)
            child = Text(self._id(), text.version, [*text.tokens], [*text.chosen])
            self.texts[child.number] = child
            self._commands.append(Fork(self._id(), text.number, [child.number]))

    def _forget_prelaunched(self) -> None:
        """As when nobody has asked for it in time."""
        self.worker.loop._prelauncher.drop_all()

    def _nothing(self) -> None:
        pass

    # Adapters.

    def _replace_any(self) -> None:
        self._replace(self._dice.randrange(NAMES))

    def _replace(self, name: int) -> None:
        """A new version, which is another adapter than the one before."""
        before, number = self._index[self._names[name]], max(self._index) + 1
        index = self._dice.choice([i for i in range(1, len(self._adapted.adapters) + 1) if i != before])
        self._index[number], self._names[name] = index, number
        self._sources[number] = AdapterSource(number, str(self._adapted.adapters[index - 1]))
        load = self._dice.random() < 0.5
        change = ChangeAdapters(self._id(), [self._sources[number]], load=load)
        if load:
            self._loads[change.op_id] = number
        self._commands.append(change)

    def _remove(self) -> None:
        """As the gateway does: versions that no name and no cache has."""
        used = {text.version for text in self.texts.values()} | set(self._names)
        unused = self._sources.keys() - used
        for number in unused:
            del self._sources[number]
        if unused:
            self._commands.append(ChangeAdapters(self._id(), removed=sorted(unused)))

    def _pin(self) -> None:
        """There is always room for one that is not pinned."""
        number = self._dice.choice([*self._sources])
        is_pinned = not self._sources[number].pinned
        if not is_pinned or sum(one.pinned for one in self._sources.values()) + 1 < self.worker.room:
            self._sources[number] = dataclasses.replace(self._sources[number], pinned=is_pinned)
            self._commands.append(ChangeAdapters(self._id(), [self._sources[number]]))

    # Another gateway, and answers.

    def _reset(self) -> None:
        """It is told nothing of what was under way, and keeps what it knows of."""
        self._round()
        for op_id in [*self._asked]:
            self._drop(op_id)
        self._loads.clear()
        claims = []
        for text in self.texts.values():
            held = TokenList()
            held.extend(text.tokens)
            digest = token_digest(held.as_array(), text.salt)
            claims.append(Claim(sequence=text.number, length=len(held), digest=digest))
        self._adopting = set(self.texts)
        sources = ChangeAdapters(self._id(), [*self._sources.values()], all=True)
        self._commands += [Reset(1), Adopt(self._id(), claims), sources]
        self._round()
        assert self._adopting is None

    def _take(self, result: Result) -> None:
        match result:
            case Forward():
                text, forward = self._asked.pop(result.op_id)
                text.tokens += forward.token_ids
                first = len(text.tokens) - forward.rows
                text.chosen += [(first + at, output.token_id) for at, output in enumerate(result.outputs)]
                self.answered += 1
            case Failed(reason=FailureReason.TIMEOUT) if self._asked[result.op_id][1].deadline_ns:
                self._drop(result.op_id)
            case WorkerEvent() if result.HasField("adapter_loaded"):
                del self._loads[result.op_id]
            case Failed() if self._loads.get(result.op_id, 0) not in self._sources:
                # Nobody used it, and it was removed before it was loaded.
                del self._loads[result.op_id]
            case WorkerEvent() if result.HasField("adopted"):
                assert set(result.adopted.kept) == self._adopting
                self._adopting = None
            case WorkerEvent() | HeldSequences():
                pass
            case _:
                raise AssertionError(f"nobody expects {result}")
