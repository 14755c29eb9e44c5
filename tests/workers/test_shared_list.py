"""Lists that share chunks, against plain lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kv import shared_list
from workers.kv.shared_list import SharedList, TokenList
from workers.kv.table import KvTable

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["extend", "cut", "copy"]), st.integers(0, 5), st.integers(0, 30)), max_size=30
)


@settings(deadline=None)
@given(operations=OPERATIONS, window=st.tuples(st.integers(-40, 40), st.integers(-40, 40)))
@pytest.mark.parametrize("kind", [SharedList, TokenList])
def test_copies_are_lists_of_their_own(
    kind: type[SharedList[int]], operations: list[tuple[str, int, int]], window: tuple[int, int]
) -> None:
    ours, plain = [kind()], [list[int]()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_list, "SEGMENT_ITEMS", 4)
        for number, (operation, which, amount) in enumerate(operations):
            i = which % len(ours)
            if operation == "extend":
                ours[i].extend(range(number, number + amount))
                plain[i].extend(range(number, number + amount))
            elif operation == "cut":
                length = min(amount, len(plain[i]))
                ours[i].cut(length)
                del plain[i][length:]
            else:
                ours.append(ours[i].copy())
                plain.append(plain[i].copy())
            for one, other in zip(ours, plain, strict=True):
                assert one == other and len(one) == one.length == len(other)
                assert list(one) == other
                assert one[window[0] : window[1]] == other[window[0] : window[1]]
                assert one[::2] == other[::2]
                assert [one[k] for k in range(-len(other), len(other))] == [*other, *other]
                if isinstance(one, TokenList):
                    assert one.as_array().tolist() == other


def test_an_index_outside_is_refused() -> None:
    for index in (0, -1):
        with pytest.raises(IndexError):
            TokenList()[index]
    assert TokenList() != 3


def test_forks_of_a_long_prompt_share_its_tokens_and_digests() -> None:
    """Each costs its list of pages, and what does not fill a chunk."""
    table = KvTable(2000)
    parent = table.create(0)
    table.reserve(parent, 30_000)
    table.append(parent, range(30_000))
    children = table.fork(parent, range(1, 101))
    for child in children:
        for shared, own in ((parent.token_ids, child.token_ids), (parent.digests, child.digests)):
            assert all(one is other for one, other in zip(shared._full, own._full, strict=True))
            assert len(own._tail) < shared_list.SEGMENT_ITEMS
    table.check_integrity()
    for child in children[1:]:
        table.release(child.key)
    table.reserve(children[0], 1)
    table.append(children[0], [7])
    assert children[0].token_ids == [*range(30_000), 7] and parent.token_ids == list(range(30_000))
    table.check_integrity()
