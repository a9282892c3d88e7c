"""Claim: a text ends at the first stop string to end, wherever the pieces' borders are, and no more is held back than
the longest beginning of a stop string."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.engine.stop_strings import StopStrings


def feed(stops: StopStrings, pieces: list[str]) -> list[str]:
    given_out = []
    for piece in pieces:
        given_out.append(stops.add(piece))
        if stops.matched is not None:
            return given_out
    return [*given_out, stops.flush()]


@pytest.mark.parametrize(
    ("stops", "pieces", "given_out", "matched"),
    [
        (["END"], ["aE", "N", "Db"], ["a", "", ""], "END"),
        (["END"], ["aE", "Nb", "c"], ["a", "ENb", "c", ""], None),
        (["END"], ["aEN"], ["a", "EN"], None),
        (["aab"], ["aaa", "b"], ["a", ""], "aab"),  # the held "aa" begins anew inside itself
        (["abc", "b"], ["abc"], ["a"], "b"),  # "b" ends first
        (["bc", "abc"], ["abc"], [""], "abc"),  # both end together: the longest
        ([], ["abc"], ["abc", ""], None),
    ],
)
def test_pieces(stops, pieces, given_out, matched):
    checker = StopStrings(stops)
    assert feed(checker, pieces) == given_out
    assert checker.matched == matched


def test_the_stop_string_stays_if_asked_for_and_what_follows_goes():
    checker = StopStrings(["END"], include_in_output=True)
    assert feed(checker, ["aE", "NDb"]) == ["a", "END"]


def test_a_stop_string_counts_where_it_may_end_even_if_it_began_before():
    checker = StopStrings(["ab", "bc", "xyz"])
    assert checker.add("xyzaba", may_end=False) == "xyzab"  # "a" may begin "ab"
    assert checker.add("bxy") == ""
    assert checker.matched == "ab"
    checker = StopStrings(["ab", "xabc"])
    assert checker.add("xab", may_end=False) == ""
    assert checker.add("d") == "xabd"  # "ab" ended before it could count
    assert checker.matched is None


_TEXT = st.text("abc", max_size=20)


@given(_TEXT, st.lists(st.text("abc", min_size=1, max_size=4), max_size=4), st.sets(st.integers(0, 20)), st.booleans())
def test_the_result_does_not_depend_on_the_pieces(text, stops, cuts, include):
    borders = sorted(cuts | {0, 20})
    split, single = StopStrings(stops, include_in_output=include), StopStrings(stops, include_in_output=include)
    in_pieces = feed(split, [text[a:b] for a, b in itertools.pairwise(borders)])
    assert "".join(in_pieces) == "".join(feed(single, list(text)))
    assert split.matched == single.matched
    if split.matched is None:
        assert "".join(in_pieces) == text
        assert not any(stop in text for stop in stops)
