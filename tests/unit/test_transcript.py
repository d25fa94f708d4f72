from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.delivery import Transcript
from actors.events import FinishReason, Timings
from models.scripted_text import ByteDecoder

TIMINGS = Timings(queued_s=0.0, prefill_s=0.0, decode_s=0.0)


def test_a_stop_string_across_tokens_is_cut_and_named() -> None:
    script = Transcript(ByteDecoder(), ("END",))
    texts = [script.add(byte).text for byte in b"okEND"]
    finished = script.finished(FinishReason.LENGTH, 3, TIMINGS)
    assert "".join(texts) == "ok"
    assert (finished.reason, finished.stop_string, finished.text) == (
        FinishReason.STOP_STRING,
        "END",
        "",
    )
    assert finished.usage.completion_tokens == 5


def test_a_tail_that_was_no_stop_string_comes_with_the_end() -> None:
    script = Transcript(ByteDecoder(), ("END",))
    texts = [script.add(byte).text for byte in b"okEN"]
    script.end()
    finished = script.finished(FinishReason.STOP, 3, TIMINGS)
    assert ("".join(texts), finished.text) == ("ok", "EN")
    assert finished.reason is FinishReason.STOP


@given(text=st.text("abé漢", max_size=30), stops=st.lists(st.text("abé", min_size=1, max_size=3)))
@settings(max_examples=200, deadline=None)
def test_the_joined_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    script = Transcript(ByteDecoder(), tuple(stops))
    joined = ""
    for byte in text.encode():
        joined += script.add(byte).text
        if script.stop_string is not None:
            break
    else:
        script.end()
    joined += script.tail
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (joined, script.stop_string) == (text, None)
    else:
        assert script.stop_string in stops
        assert joined + script.stop_string == text[: min(ends)]
