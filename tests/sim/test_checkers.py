"""Each checker accepts good runs and rejects a run that breaks just its invariant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.checkers import CHECKERS, check_all, same_journal
from tests.sim.journals import (
    DRAIN,
    FAULT,
    FRAGMENTS,
    GIVEN_UP,
    KEPT,
    LANES,
    LEAVES,
    LEAVES_QUEUE,
    LIMITS,
    PARKED,
    PLAIN,
    PREEMPTED,
    REFUSED,
    STORE,
    WHOLE,
    run_of,
)
from tests.sim.notation import after, cut, edit, parse
from tests.sim.run import CheckFailed

SENT = "0.1 decode    token a 0 7"
READ = "0.1 client    client_event a delta:0 x"
END = "0.2 decode    terminal a finished length"
SEEN = "0.2 client    client_event a finished length,3,2"
CLOSED = "0.1 client    client_closed a"
DRAINED = "3.0 decode    terminal a failed shutting_down"

#: invariant, what is wrong, the broken run
BROKEN: list[tuple[str, str, str]] = [
    ("I1", "no terminal event", cut(PLAIN, END)),
    ("I1", "two terminal events", after(PLAIN, END, END)),
    ("I1", "the client saw no end", cut(PLAIN, SEEN)),
    ("I1", "the channel stays open", cut(PLAIN, "0.2 client    client_event a end -")),
    ("I1", "a cancelled one is forgotten", cut(LEAVES, "0.2 decode    cancel_seen a decode")),
    ("I2", "a token after the end", after(PLAIN, END, "0.2 decode token a 2 9")),
    ("I2", "the client gets more", after(PLAIN, SEEN, "0.2 client client_event a delta:2 z")),
    ("I3", "a gap", edit(PLAIN, SENT, "0.1 decode token a 1 7")),
    ("I3", "a repeat at the client", after(PLAIN, READ, READ)),
    ("I3", "a delta from nowhere", cut(PLAIN, "0.2 decode    token a 1 8")),
    ("I4", "another text", edit(PLAIN, READ, "0.1 client client_event a delta:0 z")),
    ("I4", "text is missing", PLAIN.replace("delta:1 y", "delta:1 -")),
    ("I4", "another reason", edit(PLAIN, SEEN, "0.2 client client_event a finished stop,3,2")),
    (
        "I5",
        "refused and queued",
        after(REFUSED, "0.0 admission refused a context_length", "0.0 prefill queued a NORMAL 5"),
    ),
    ("I6", "two starts", after(PLAIN, "0.2 decode    granted 0", "0.2 decode started a 2 0 1")),
    ("I7", "a token too many", edit(PLAIN, SEEN, "0.2 client client_event a finished length,3,3")),
    ("I7", "a prompt too long", edit(PLAIN, SEEN, "0.2 client client_event a finished length,4,2")),
    (
        "I8",
        "planned after the close",
        edit(LEAVES, "0.2 decode    planned 3 () () 0", "0.2 decode planned 3 ('a',) () 1"),
    ),
    (
        "I8",
        "two rows wasted",
        after(
            after(PLAIN, "0.2 decode    stepped 2", "0.2 decode planned 3 ('a',) () 1"),
            "0.2 decode planned 3 ('a',) () 1",
            "0.2 decode planned 4 ('a',) () 1",
        ),
    ),
    ("I9", "the slot is held in the next step", cut(LEAVES, "0.2 decode    slot_freed 0 a")),
    (
        "I9",
        "the lease is kept",
        edit(LEAVES, "0.2 cache     lease_released a 1 0", "0.3 cache lease_released a 1 0"),
    ),
    (
        "I10",
        "swept late",
        edit(LEAVES_QUEUE, "0.25 prefill  swept a cancelled", "0.5 prefill swept a cancelled"),
    ),
    (
        "I10",
        "never swept",
        "\n".join(LEAVES_QUEUE.strip().splitlines()[:5]) + "\n1.0 client probe nothing 0",
    ),
    ("I11", "a token after the close", after(LEAVES, CLOSED, SENT)),
    ("I12", "another one's token", edit(PLAIN, SENT, "0.1 decode token a 0 9")),
    ("I13", "overtaken in the lane", LANES.replace("picked a HIGH", "picked b HIGH", 1)),
    (
        "I13",
        "overtaken in admission",
        """
        0.0 client client_sent a NORMAL
        0.0 client client_sent b NORMAL
        0.1 prefill queued b NORMAL 5
        0.1 prefill queued a NORMAL 5""",
    ),
    ("I14", "lower lane first", LANES.replace("picked a HIGH 0", "picked c NORMAL 0", 1)),
    ("I14", "skip rule too early", LANES.replace("picked a HIGH 0", "picked c NORMAL 1", 1)),
    (
        "I15",
        "a lane starves",
        LANES.replace("picked c NORMAL 1", "picked b HIGH 0")
        .replace("picked b HIGH 0", "picked e HIGH 0")
        .replace("picked d NORMAL 1", "picked f HIGH 0")
        .replace("queued e HIGH 5", "queued e HIGH 5\n0.0 prefill queued f HIGH 5"),
    ),
    (
        "I15",
        "it waits for nothing",
        """
        0.0 decode granted 0
        0.0 prefill queued a HIGH 5
        0.1 client probe nothing 0""",
    ),
    (
        "I16",
        "a refused head loses its turn",
        edit(
            after(LANES, "0.0 prefill queued e HIGH 5", "0.0 prefill queued f NORMAL 5"),
            "0.5 prefill picked d NORMAL 1",
            "0.5 prefill picked f NORMAL 1",
        ),
    ),
    (
        "I17",
        "two in one slot",
        after(PLAIN, "0.0 decode    started a 1 0 1", "0.0 decode started b 2 0 1"),
    ),
    (
        "I17",
        "too many",
        after(PLAIN, "0.0 decode    started a 1 0 1", "0.0 decode started b 2 1 1"),
    ),
    ("I18", "a wrong sum", edit(PLAIN, "0.0 cache     leased a 1 5 5", "0.0 cache leased a 1 5 6")),
    (
        "I18",
        "over the budget",
        edit(PLAIN, "0.0 cache     leased a 1 5 5", "0.0 cache leased a 1 11 11"),
    ),
    (
        "I19",
        "too many inside",
        "\n".join(f"0.0 admission submitted r{n} NORMAL" for n in range(LIMITS.places + 1)),
    ),
    (
        "I19",
        "too many waiting",
        "\n".join(f"0.0 prefill queued r{n} NORMAL 5" for n in range(LIMITS.places + 1)),
    ),
    (
        "I19",
        "too many undelivered",
        "\n".join(f"0.0 decode token a {n} 7" for n in range(LIMITS.token_channel + 1)),
    ),
    ("I20", "offered twice", after(PLAIN, "0.0 decode    granted 0", "0.0 decode granted 0")),
    ("I20", "not offered", cut(PLAIN, "0.0 decode    granted 0")),
    (
        "I20",
        "freed by another",
        edit(PLAIN, "0.2 decode    slot_freed 0 a", "0.2 decode slot_freed 0 b"),
    ),
    ("I20", "a slot is lost", cut(LEAVES, "0.2 decode    granted 0")),
    (
        "I21",
        "released twice",
        after(PLAIN, "0.2 cache     lease_released a 1 0", "0.2 cache lease_released a 1 0"),
    ),
    ("I21", "no lease", edit(PLAIN, "0.0 decode    started a 1 0 1", "0.0 decode started a 1 0 2")),
    (
        "I21",
        "released while it runs",
        after(PLAIN, "0.0 decode    started a 1 0 1", "0.0 cache lease_released a 1 0"),
    ),
    (
        "I21",
        "a leak",
        edit(
            PLAIN,
            "1.0 world     probe idle (('leases',0),)",
            "1.0 world probe idle (('leases',1),)",
        ),
    ),
    (
        "I22",
        "a wrong sum",
        edit(PLAIN, "0.1 decode    planned 2 ('a',) () 1", "0.1 decode planned 2 ('a',) () 2"),
    ),
    ("I22", "too many tokens", PLAIN.replace("('a',3),) 3", "('a',6),) 6")),
    ("I22", "too many rows", PLAIN.replace("('a',) () 1", "('a','b','c') () 3")),
    ("I22", "too many prompts", PLAIN.replace("('a',3),) 3", "('a',1),('b',1),('c',1)) 3")),
    ("I22", "too much padding", PLAIN.replace("('a',3),) 3", "('a',3),('b',1)) 4")),
    ("I22", "not all computed anew", PREEMPTED.replace("('a',4),) 4", "('a',5),) 5")),
    ("I8", "drawn too often", PREEMPTED.replace("planned 3 () () 0", "planned 3 ('a',) () 1")),
    ("I18", "a lease that grew too far", PREEMPTED.replace("changed a 1 5 5", "changed a 1 11 11")),
    (
        "I20",
        "withheld and offered",
        after(PREEMPTED, "0.0 decode granted 0", "0.0 decode withheld 0"),
    ),
    (
        "I24",
        "left out without need",
        cut(PREEMPTED, "0.1 decode starved a").replace(
            "0.1 decode preempted a 4 3", "0.1 decode planned 9 () () 0\n0.1 decode preempted a 4 3"
        ),
    ),
    ("I24", "it could go on", edit(PREEMPTED, "0.2 decode planned 2 () (('a',4),) 4", "")),
    ("I22", "decodes too early", PLAIN.replace("('a',3),) 3", "('a',2),) 2")),
    ("I22", "a prompt too long", PLAIN.replace("('a',3),) 3", "('a',4),) 4")),
    ("I22", "twice in a step", PLAIN.replace("('a',) () 1", "('a','a') () 2")),
    ("I23", "planned while parked", cut(PARKED, "0.6 decode  resumed a")),
    ("I23", "ended too late", PARKED.replace("1.7 ", "2.5 ")),
    ("I23", "ended too early", PARKED.replace("1.7 ", "1.5 ")),
    (
        "I23",
        "it has read",
        after(PARKED, "0.7 decode  parked a", "1.0 client client_event a delta:1 y"),
    ),
    (
        "I24",
        "left out",
        edit(PLAIN, "0.1 decode    planned 2 ('a',) () 1", "0.1 decode planned 2 () (('b',1),) 1"),
    ),
    (
        "I24",
        "time is lost",
        edit(PLAIN, "0.1 decode    planned 2 ('a',) () 1", "0.15 decode planned 2 ('a',) () 1"),
    ),
    (
        "I26",
        "accepted while draining",
        after(DRAIN, "1.0 lifecycle phase draining", "1.1 admission accepted d 3"),
    ),
    ("I27", "too long", DRAIN.replace("3.0 ", "3.5 ")),
    ("I27", "no end", cut(DRAIN, "3.0 world     ended").replace("3.1 ", "4.0 ")),
    ("I27", "forgotten", cut(DRAIN, DRAINED)),
    ("I28", "an actor lives on", after(PLAIN, "1.0 world     ended", "1.0 decode granted 0")),
    ("I29", "not failed", cut(FAULT, "0.1 decode    terminal a failed engine_error")),
    ("I29", "the wrong failure", FAULT.replace("failed engine_error", "failed invalid_request")),
    (
        "I29",
        "a waiting one fails too",
        after(FAULT, "0.1 decode    engine_fault 1", "0.1 prefill terminal b failed engine_error"),
    ),
    (
        "I29",
        "a waiting one is lost",
        after(FAULT, "0.1 pipeline  crashed pipeline", "0.1 prefill terminal b failed internal"),
    ),
    (
        "I30",
        "restarted too often",
        edit(GIVEN_UP, "0.2 pipeline escalated pipeline", "0.3 pipeline restarted pipeline 2"),
    ),
    (
        "I30",
        "restarted after giving up",
        after(GIVEN_UP, "0.2 pipeline escalated pipeline", "0.3 pipeline restarted pipeline 2"),
    ),
    ("I30", "no end", cut(GIVEN_UP, "0.2 world    ended")),
    (
        "I31",
        "an old one goes on",
        FAULT.replace("planned 2 () (('b',3),) 3", "planned 2 ('a',) () 1"),
    ),
    (
        "I31",
        "a slot is lost",
        edit(cut(FAULT, "0.2 decode    started b 2 0 1"), "0.2 decode    granted 0", ""),
    ),
    ("I31", "old leases survive", FAULT.replace("leased b 1 5 5", "leased b 2 5 10")),
    ("I32", "another prompt", KEPT.replace("(7,) (1,2)", "(7,) (1,9)")),
    (
        "I32",
        "the whole prompt",
        KEPT.replace("prefix b 2", "prefix b 3").replace("(7,) (1,2)", "(7,) (1,2,3)"),
    ),
    ("I32", "less than announced", KEPT.replace("(7,) (1,2)", "(7,) (1,)")),
    (
        "I33",
        "used too late",
        after(KEPT, "0.1 engine engine_kept 7 (1,2)", "0.1 engine engine_forgot 7"),
    ),
    (
        "I33",
        "forgotten twice",
        after(KEPT, "0.3 engine engine_forgot 7", "0.3 engine engine_forgot 7"),
    ),
    (
        "I33",
        "kept twice",
        after(KEPT, "0.1 engine engine_kept 7 (1,2)", "0.1 engine engine_kept 7 (3,4)"),
    ),
    (
        "I34",
        "expired",
        edit(STORE, "1.5 client probe store_get ('k',-1)", "1.5 client probe store_get ('k',10)"),
    ),
    (
        "I34",
        "deleted",
        edit(STORE, "1.8 client probe store_get ('k',-1)", "1.8 client probe store_get ('k',20)"),
    ),
    (
        "I34",
        "another body",
        edit(STORE, "0.9 client probe store_get ('k',10)", "0.9 client probe store_get ('k',9)"),
    ),
    ("I35", "too many entries", STORE.replace("store_size (1,10)", "store_size (3,10)")),
    ("I35", "too many bytes", STORE.replace("store_size (1,10)", "store_size (1,101)")),
    (
        "I37",
        "never finished",
        edit(
            cut(PLAIN, "1.0 lifecycle phase draining"), SEEN, "0.2 client client_event a failed x"
        ),
    ),
]


@pytest.mark.parametrize("text", WHOLE.values(), ids=WHOLE.keys())
def test_good_runs_are_accepted(text: str) -> None:
    check_all(run_of(text, valid=text is not REFUSED))


@pytest.mark.parametrize(("text", "names"), FRAGMENTS.items(), ids=FRAGMENTS.values())
def test_good_fragments_are_accepted(text: str, names: str) -> None:
    for name in names.split():
        CHECKERS[name](run_of(text))


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, text) for name, _, text in BROKEN],
    ids=[f"{name}: {what}" for name, what, _ in BROKEN],
)
def test_broken_runs_are_rejected(name: str, text: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        CHECKERS[name](run_of(text))
    assert caught.value.invariant == name


def test_a_late_token_is_rejected() -> None:
    CHECKERS["I25"](run_of(PLAIN, deadline_s=0.1))
    with pytest.raises(CheckFailed, match=r"I25 \[a\]"):
        CHECKERS["I25"](run_of(PLAIN, deadline_s=0.05))  # planned again at 0.1
    with pytest.raises(CheckFailed, match=r"I25 \[a\]"):
        CHECKERS["I25"](
            run_of(PLAIN.replace("0.2 decode    token", "0.3 decode    token"), deadline_s=0.1)
        )


def test_an_invalid_request_must_not_be_queued() -> None:
    with pytest.raises(CheckFailed, match="invalid request"):
        CHECKERS["I5"](run_of(PLAIN, valid=False))


def test_strict_lanes_know_no_skip_rule() -> None:
    run = run_of(LANES)
    with pytest.raises(CheckFailed, match="I14"):
        CHECKERS["I14"](replace(run, limits=replace(LIMITS, priority_max_skips=0)))


def test_different_journals_are_rejected() -> None:
    entries = parse(PLAIN)
    same_journal(entries, parse(PLAIN))
    with pytest.raises(CheckFailed, match="I39"):
        same_journal(entries, entries[:-1])
    with pytest.raises(CheckFailed, match="I39"):
        same_journal(entries, parse(PLAIN.replace("token a 0 7", "token a 0 8")))


def test_every_checker_has_a_broken_run() -> None:
    assert set(CHECKERS) - {name for name, _, _ in BROKEN} == {"I25"}


def test_the_message_names_invariant_time_and_request() -> None:
    with pytest.raises(CheckFailed, match=r"I3 \[a\]: expected position 0 t=0\.100000 decode"):
        CHECKERS["I3"](run_of(edit(PLAIN, SENT, "0.1 decode token a 1 7")))
