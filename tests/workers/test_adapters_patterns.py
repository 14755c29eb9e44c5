"""Patterns of adapters match what Python's re matches, and cannot take exponential time."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.adapters.errors import AdapterError
from workers.adapters.patterns import Pattern, Steps

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.self_attn.o_proj",
    "model.layers.1.mlp.gate_proj",
    "model.language_model.layers.1.mlp.down_proj",
    "model.vision_tower.encoder.layers.0.self_attn.k_proj",
    "lm_head",
]
# As tools of training write them.
REAL = [
    "q_proj",
    "layers.1.mlp.gate_proj",
    "^model.layers.0.self_attn.q_proj",
    r".*\.(q_proj|o_proj)$",
    r".*layers\.(0|11)\.self_attn\.[qo]_proj",
    r"^(?!.*(?:visual|vision_tower|lm_head)).*(?:q_proj|gate_proj|down_proj).*",
    r"^(language_model|model)(?!.*(lm_head|output|emb|wte|shared)).*",
    (
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp|ffn).*?(?:k_proj|q_proj|down_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|gate_proj)))"
    ),
    r"model\.layers\.\d+\.(?P<kind>mlp|self_attn)\.\w+_proj",
    r"model.layers.[^0-9]+",
    r"model\.layers\.(?:[0-9]|1[0-5])\..*",
    r"(?=.*mlp)(?=.*down).*",
    "",
    ".*",
]
SUPPORTED = st.recursive(
    st.sampled_from(
        ["a", "b", ".", r"\.", r"\d", r"\w", r"\W", r"\D", "0", "_", "^", "$", r"\b", "[ab]", "[^a]",
         "[0-9.]", "[a-b_]", r"[\d_]", "[]a]", "[a-]", r"[\w.-]", ""]
    ),
    lambda part: st.one_of(
        st.lists(part, min_size=1, max_size=4).map("".join),
        st.lists(part, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(
            st.sampled_from(["({})", "(?:{})", "(?={})", "(?!{})"]), part
        ).map(lambda pair: pair[0].format(pair[1])),
        st.tuples(part, st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,}", "{,2}", "{0,3}?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=12,
)  # fmt: skip


def assert_agrees(pattern: str, name: str) -> None:
    compiled = Pattern(pattern, Steps())
    assert compiled.matches(name) == (re.fullmatch(pattern, name) is not None), (pattern, name)
    expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
    assert compiled.matches_end(name) == expected, (pattern, name)


@given(SUPPORTED, st.text("ab.0_", min_size=1, max_size=8))
def test_as_re(pattern: str, name: str) -> None:
    assert_agrees(pattern, name)


@pytest.mark.parametrize("pattern", REAL)
def test_patterns_of_tools(pattern: str) -> None:
    for name in NAMES:
        assert_agrees(pattern, name)


@given(st.text(r"ab0.\dwsbB*+?{},[]^-$|()=!<>P:'#x1 ", max_size=12), st.text("ab.0_", min_size=1, max_size=6))
def test_any_text_is_refused_or_as_re(pattern: str, name: str) -> None:
    try:
        Pattern(pattern, Steps())
    except AdapterError:
        return
    warnings.simplefilter("ignore")  # of sets that a later version may read in another way
    assert_agrees(pattern, name)


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a*)*b", "(a|a)*b", "(a|aa)+$b", "(.*a){20}b", "((a{0,50}){0,50}){0,50}b"]
)
def test_patterns_on_which_re_takes_for_ever(pattern: str) -> None:
    assert not Pattern(pattern, Steps()).matches("a" * 60)
    assert Pattern(pattern, Steps()).matches("a" * 60 + "b") == ("$" not in pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(?:){65536}" * 40, "(?:(?:(?:(?:|){9999}){9999}){9999}){9999}", "(?=" * 9 + ".*" * 9 + ")*" * 9],
)
# A tenth of the default, and the default: seconds.
@pytest.mark.parametrize("most", [200_000, pytest.param(2_000_000, marks=pytest.mark.thorough)])
def test_what_takes_too_long_is_refused(pattern: str, most: int) -> None:
    compiled = Pattern(pattern, Steps(most))
    with pytest.raises(AdapterError, match="take too long to match: name the modules instead"):
        [compiled.matches_end("a.b" * 20) for _ in range(1000)]


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (r"(a)\1", "which is not supported"),
        ("(?<=a)b", "a group of a kind"),
        ("(?i)q_proj", "a group of a kind"),
        ("a*+", "repeats a repetition"),
        ("a++", "repeats a repetition"),
        ("*a", "repeats nothing"),
        ("^*", "repeats an anchor"),
        ("(a", "has an unclosed"),
        ("a)", "has an unopened"),
        ("[a", "ends too early"),
        ("a\\", "ends too early"),
        ("[b-a]", "must not have the range b-a"),
        (r"[\d-a]", r"must not have the range \d-a"),
        ("a{3,1}", "must not have {3,1}"),
        ("a{999999}", "must not have {999999}"),
        ("(" * 40 + ")" * 40, "is nested too deeply"),
        ("a*" * 3000, "has more than 4096 characters"),
    ],
)
def test_what_is_not_supported_is_refused(pattern: str, fault: str) -> None:
    with pytest.raises(AdapterError, match=re.escape(fault)):
        Pattern(pattern, Steps())
