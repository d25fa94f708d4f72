"""Stop strings: equal to a search over the whole text, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.stopping import StopMatcher

WORDS = st.text(alphabet="ab\n🙂", min_size=1, max_size=5)
STOPS = st.lists(WORDS, max_size=4).map(tuple)
TEXT = st.text(alphabet="ab\n🙂c", max_size=40)


def naive(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(piece)[0] for piece in pieces)
    return out + matcher.flush(), matcher.matched


@given(TEXT, STOPS)
def test_the_whole_text_equals_the_naive_search(text: str, stops: tuple[str, ...]) -> None:
    assert run([text], stops) == naive(text, stops)


@given(st.lists(st.text(alphabet="ab\n🙂c", max_size=6), max_size=12), STOPS)
def test_any_split_gives_what_the_whole_gives(pieces: list[str], stops: tuple[str, ...]) -> None:
    assert run(pieces, stops) == naive("".join(pieces), stops)


@given(TEXT, STOPS)
def test_no_more_is_held_than_a_stop_string_can_need(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for position, char in enumerate(text):
        piece, matched = matcher.push(char)
        if matched is not None:
            return
        sent += piece
        held = text[len(sent) : position + 1]
        assert sent + held == text[: position + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_across_three_pieces() -> None:
    matcher = StopMatcher(("</end>",))
    assert matcher.push("text</") == ("text", None)
    assert matcher.push("en") == ("", None)
    assert matcher.push("d>rest") == ("", "</end>")
    assert matcher.push("more") == ("", "</end>")
    assert matcher.flush() == ""


def test_a_false_start_is_released_as_soon_as_it_fails() -> None:
    matcher = StopMatcher(("aab",))
    assert matcher.push("aa") == ("", None)
    assert matcher.push("a") == ("a", None)
    assert matcher.push("c") == ("aac", None)
    assert matcher.flush() == ""


def test_nested_stop_strings_end_with_the_character_that_completes_one() -> None:
    assert run(["abcd"], ("abcd", "bc")) == ("a", "bc")
    assert run(["abc"], ("bc", "abc")) == ("", "abc")


def test_nothing_is_held_without_stop_strings() -> None:
    assert StopMatcher(()).push("any text") == ("any text", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""))
