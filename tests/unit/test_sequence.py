from __future__ import annotations

import pytest

from actors.core.loop_detector import LoopDetector
from actors.core.sequence import Sequence, SequencePhase
from actors.events import FinishReason
from actors.requests import LoopRule
from models.engine import KeptPrefix
from models.sampling import GREEDY, SamplingParams


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


def test_an_end_token_before_its_time_is_an_ordinary_token() -> None:
    seq = sequence(max_tokens=5)
    seq.min_tokens = 2
    seq.evaluated(5)
    assert [seq.draw(token) for token in (9, 1, 9)] == [None, None, FinishReason.STOP]
    assert seq.generated == [9, 1]


def test_a_loop_ends_it_and_the_token_counts() -> None:
    seq = sequence(max_tokens=9)
    seq.loop = LoopDetector(LoopRule(min_size=1, max_size=2, count=3))
    seq.evaluated(5)
    assert [seq.draw(token) for token in (1, 4, 4, 4)] == [None, None, None, FinishReason.LOOP]
    assert seq.phase is SequencePhase.ENDING
    assert seq.drawn == 4


def test_what_the_engine_holds() -> None:
    seq = sequence(prompt=5, max_tokens=9)
    seq.evaluated(3)
    assert (seq.held, seq.tokens) == (3, 5)
    seq.evaluated(2)
    seq.draw(1)
    assert (seq.held, seq.tokens) == (5, 6)
    seq.decoded()
    seq.draw(2)
    assert (seq.held, seq.tokens) == (6, 7)


def test_it_opens_from_a_prefix() -> None:
    seq = sequence(prompt=5)
    prefix = KeptPrefix(handles=(4,), tokens=3)
    seq.open_from(prefix)
    first = seq.chunk(1)
    assert (first.prefix, first.start, first.tokens) == (prefix, 3, (3,))
    seq.in_engine = True
    assert not seq.evaluated(1)
    assert seq.chunk(1).prefix is None
    with pytest.raises(AssertionError):
        sequence(prompt=5).open_from(KeptPrefix(handles=(4,), tokens=5))


def test_a_snapshot_is_taken_before_the_last_token_of_the_prompt() -> None:
    seq = sequence(prompt=5)
    seq.keep_as = 7
    assert seq.next_chunk == 4
    assert seq.chunk(2).keep_as is None
    assert not seq.evaluated(2)
    assert seq.next_chunk == 2
    assert seq.chunk(2).keep_as == 7
    assert seq.evaluated(2)
    last = seq.chunk(1)
    assert (last.keep_as, last.sampling) == (None, GREEDY)
    assert not seq.evaluated(1)


def test_a_preempted_sequence_is_computed_anew_and_goes_on() -> None:
    seq = sequence(prompt=3, max_tokens=4)
    seq.sampling = SamplingParams(repetition_penalty=1.5)
    seq.evaluated(3)
    seq.in_engine = True
    seq.draw(7)
    seq.decoded()
    seq.draw(8)
    seq.preempt()
    assert (seq.held, seq.remaining_prompt, seq.in_engine) == (0, 5, False)
    seq.phase = SequencePhase.PREFILL
    first = seq.chunk(4)
    assert (first.tokens, first.sampling, first.generated) == ((0, 1, 2, 7), None, 0)
    seq.evaluated(4)
    last = seq.chunk(1)
    assert (last.tokens, last.sampling, last.generated) == ((8,), seq.sampling, 2)
    assert last.history == (0, 1, 2, 7, 8)
    seq.evaluated(1)
    assert seq.draw(6) is None
    assert seq.draw(5) is FinishReason.LENGTH
