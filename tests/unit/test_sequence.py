from __future__ import annotations

import pytest

from actors.core.sequence import Sequence, SequencePhase
from actors.events import FinishReason
from models.sampling import GREEDY


def sequence(
    prompt: int = 5, max_tokens: int = 3, eos: frozenset[int] = frozenset({9})
) -> Sequence:
    return Sequence(
        sequence_id=1,
        request_id="r",
        slot=0,
        prompt_ids=tuple(range(prompt)),
        max_tokens=max_tokens,
        sampling=GREEDY,
        eos_ids=eos,
        started_s=0.0,
    )


def test_only_the_chunk_that_ends_the_prompt_carries_sampling() -> None:
    seq = sequence(prompt=5)
    first = seq.chunk(3)
    seq.evaluated(3)
    last = seq.chunk(2)
    assert seq.phase is SequencePhase.PREFILL
    seq.evaluated(2)
    assert (first.start, first.tokens, first.sampling) == (0, (0, 1, 2), None)
    assert (last.start, last.tokens, last.sampling) == (3, (3, 4), GREEDY)
    assert seq.phase is SequencePhase.DECODE


def test_the_last_token_of_its_length_ends_it() -> None:
    seq = sequence(max_tokens=2)
    seq.evaluated(5)
    assert seq.draw(1) is None
    assert seq.draw(2) is FinishReason.LENGTH
    assert seq.drawn == 2
    with pytest.raises(AssertionError):
        seq.draw(3)


def test_an_end_token_is_not_counted() -> None:
    seq = sequence()
    seq.evaluated(5)
    assert seq.draw(9) is FinishReason.STOP
    assert seq.drawn == 0


def test_an_end_token_is_an_ordinary_token_when_there_are_none() -> None:
    seq = sequence(eos=frozenset())
    seq.evaluated(5)
    assert seq.draw(9) is None
    assert seq.drawn == 1


def test_parked_since_the_first_time_until_it_resumes() -> None:
    seq = sequence()
    assert seq.park(1.0)
    assert not seq.park(2.0)
    assert seq.parked_since_s == 1.0
    assert seq.resume()
    assert not seq.resume()
