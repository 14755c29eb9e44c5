"""Lists that share chunks, against plain lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kv import shared_list
from workers.kv.shared_list import SharedList, TokenList

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
