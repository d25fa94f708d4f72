"""Short good runs, in the notation of ``notation.py``; the broken ones derive from them.

Prompts have 3 tokens, answers 2 (ids 7 and 8, text "xy"), a step takes 0.1 s.
"""

from __future__ import annotations

import math

from actors.limits import Limits
from actors.requests import Priority
from tests.sim.notation import parse
from tests.sim.run import RequestFacts, Run

LIMITS = Limits(
    max_slots=1,
    max_queue_depth=6,
    token_buffer=1,
    priority_max_skips=1,
    slot_context_tokens=10,
    cache_budget_tokens=10,
    prefill_chunk_min_tokens=1,
    step_tokens=5,
    max_batch=2,
    max_batch_prefill=2,
    max_batch_prefill_tokens=4,
    sweep_s=0.25,
    poll_s=0.1,
    stall_s=1.0,
    drain_s=2.0,
    restart_max=1,
    restart_backoff_s=0.1,
    store_max_entries=2,
    store_max_bytes=100,
    store_ttl_s=1.0,
)

PLAIN = """
    0.0 decode    granted 0
    0.0 client    client_sent a NORMAL
    0.0 admission submitted a NORMAL
    0.0 admission accepted a 3
    0.0 client    client_event a accepted 3
    0.0 prefill   queued a NORMAL 5
    0.0 prefill   picked a NORMAL 0
    0.0 cache     leased a 1 5 5
    0.0 decode    started a 1 0 1
    0.0 decode    planned 1 () (('a',3),) 3
    0.0 client    client_event a started 0
    0.1 decode    stepped 1
    0.1 decode    planned 2 ('a',) () 1
    0.1 decode    token a 0 7
    0.1 client    client_event a delta:0 x
    0.2 decode    stepped 2
    0.2 decode    token a 1 8
    0.2 decode    terminal a finished length
    0.2 decode    slot_freed 0 a
    0.2 decode    granted 0
    0.2 cache     lease_released a 1 0
    0.2 client    client_event a delta:1 y
    0.2 client    client_event a finished length,3,2
    0.2 client    client_event a end -
    1.0 world     probe idle (('leases',0),)
    1.0 lifecycle phase draining
    1.0 world     ended
"""

REFUSED = """
    0.0 client    client_sent a NORMAL
    0.0 admission submitted a NORMAL
    0.0 admission refused a context_length
    0.0 client    client_event a failed context_length
    0.0 client    client_event a end -
    0.0 client    client_sent b NORMAL
    0.0 client    client_event b turned_away server_busy
    1.0 world     ended
"""

#: The client leaves while its first token is delivered; the step in flight is the last.
LEAVES = """
    0.0 decode    granted 0
    0.0 client    client_sent a NORMAL
    0.0 admission submitted a NORMAL
    0.0 admission accepted a 3
    0.0 prefill   queued a NORMAL 5
    0.0 prefill   picked a NORMAL 0
    0.0 cache     leased a 1 5 5
    0.0 decode    started a 1 0 1
    0.0 decode    planned 1 () (('a',3),) 3
    0.1 decode    stepped 1
    0.1 decode    planned 2 ('a',) () 1
    0.1 client    client_closed a
    0.2 decode    stepped 2
    0.2 decode    cancel_seen a decode
    0.2 decode    slot_freed 0 a
    0.2 decode    granted 0
    0.2 decode    planned 3 () () 0
    0.2 cache     lease_released a 1 0
    0.2 decode    stepped 3
    1.0 world     ended
"""

#: Nobody has a slot; the client of ``a`` leaves the queue.
LEAVES_QUEUE = """
    0.0 client    client_sent a NORMAL
    0.0 admission submitted a NORMAL
    0.0 admission accepted a 3
    0.0 prefill   queued a NORMAL 5
    0.1 client    client_closed a
    0.25 prefill  swept a cancelled
    0.25 prefill  cancel_seen a queued
    1.0 client    probe nothing 0
"""

#: Three lanes, one slot, at most one skip: the middle ones go by the skip rule.  ``d`` is refused
#: by the cache once and keeps its turn.
LANES = """
    0.0 prefill queued a HIGH 5
    0.0 prefill queued b HIGH 5
    0.0 prefill queued c NORMAL 5
    0.0 prefill queued d NORMAL 5
    0.0 prefill queued e HIGH 5
    0.1 prefill picked a HIGH 0
    0.1 cache   leased a 1 5 5
    0.1 decode  granted 0
    0.1 decode  started a 1 0 1
    0.2 decode  slot_freed 0 a
    0.2 decode  granted 0
    0.2 cache   lease_released a 1 0
    0.2 prefill picked c NORMAL 1
    0.2 cache   leased c 2 5 5
    0.2 decode  started c 2 0 2
    0.3 decode  slot_freed 0 c
    0.3 decode  granted 0
    0.3 cache   lease_released c 2 0
    0.3 prefill picked b HIGH 0
    0.3 cache   leased b 3 5 5
    0.3 decode  started b 3 0 3
    0.4 decode  slot_freed 0 b
    0.4 decode  granted 0
    0.4 cache   lease_released b 3 0
    0.4 prefill picked d NORMAL 1
    0.4 cache   lease_refused d 5 0
    0.4 prefill requeued d NORMAL
    0.5 prefill picked d NORMAL 1
    0.5 cache   leased d 4 5 5
    0.5 decode  started d 4 0 4
"""

#: The client naps: the row is parked, resumed, parked again and ended as slow.
PARKED = """
    0.0 decode  granted 0
    0.0 prefill picked a NORMAL 0
    0.0 cache   leased a 1 5 5
    0.0 decode  started a 1 0 1
    0.1 decode  parked a
    0.5 client  client_event a delta:0 x
    0.6 decode  resumed a
    0.6 decode  planned 3 ('a',) () 1
    0.7 decode  stepped 3
    0.7 decode  parked a
    1.7 decode  terminal a failed slow_client
    1.7 decode  slot_freed 0 a
    1.7 decode  granted 0
"""

#: Step 1 fails: ``a`` fails with it, ``b`` waits on and starts after the restart.
FAULT = """
    0.0 decode    granted 0
    0.0 prefill   queued a NORMAL 5
    0.0 prefill   queued b NORMAL 5
    0.0 prefill   picked a NORMAL 0
    0.0 cache     leased a 1 5 5
    0.0 decode    started a 1 0 1
    0.0 decode    planned 1 () (('a',3),) 3
    0.1 decode    engine_fault 1
    0.1 decode    terminal a failed engine_error
    0.1 pipeline  crashed pipeline
    0.2 pipeline  restarted pipeline 1
    0.2 decode    granted 0
    0.2 prefill   picked b NORMAL 0
    0.2 cache     leased b 1 5 5
    0.2 decode    started b 2 0 1
    0.2 decode    planned 2 () (('b',3),) 3
    0.3 decode    stepped 2
"""

#: A second crash is one too many for ``restart_max`` 1.
GIVEN_UP = """
    0.0 pipeline crashed pipeline
    0.1 pipeline restarted pipeline 1
    0.2 pipeline crashed pipeline
    0.2 pipeline escalated pipeline
    0.2 prefill  terminal a failed internal
    0.2 world    ended
"""

DRAIN = """
    0.0 client    client_sent a NORMAL
    0.0 admission submitted a NORMAL
    0.0 admission accepted a 3
    0.0 client    client_event a accepted 3
    1.0 lifecycle phase draining
    1.5 client    client_sent b NORMAL
    1.5 client    client_event b turned_away shutting_down
    3.0 decode    terminal a failed shutting_down
    3.0 client    client_event a failed shutting_down
    3.0 client    client_event a end -
    3.0 lifecycle phase stopped
    3.0 world     ended
    3.1 client    client_sent c NORMAL
    3.1 client    client_event c turned_away shutting_down
"""

STORE = """
    0.0 client probe store_put ('k',10,1)
    0.1 client probe store_size (1,10)
    0.9 client probe store_get ('k',10)
    1.5 client probe store_get ('k',-1)
    1.6 client probe store_put ('k',20,1)
    1.7 client probe store_delete ('k',1)
    1.8 client probe store_get ('k',-1)
"""

#: ``a`` leaves its cache, ``b`` begins with the first two tokens of it; both have the prompt 1 2 3.
KEPT = """
    0.0 decode started a 1 0 1
    0.1 engine engine_kept 7 (1,2)
    0.2 decode started b 2 0 2
    0.2 decode prefix b 2
    0.2 engine engine_opened 2 (7,) (1,2)
    0.3 engine engine_forgot 7
"""

#: ``a`` has one of its two tokens when its cache is taken; it comes back and goes on.
PREEMPTED = """
    0.0 decode granted 0
    0.0 admission accepted a 3
    0.0 cache  leased a 1 4 4
    0.0 decode started a 1 0 1
    0.0 decode planned 1 () (('a',3),) 3
    0.1 decode stepped 1
    0.1 decode starved a
    0.1 decode preempted a 4 3
    0.1 cache  lease_changed a 1 0 0
    0.2 cache  lease_changed a 1 5 5
    0.2 decode grew a 5
    0.2 decode returned a
    0.2 decode planned 2 () (('a',4),) 4
    0.3 decode stepped 2
    0.3 decode slot_freed 0 a
    0.3 decode withheld 0
    0.3 decode planned 3 () () 0
    0.3 cache  lease_released a 1 0
    0.4 decode stepped 3
    0.4 decode granted 0
"""

#: Whole runs: every checker accepts them.
WHOLE = {"plain": PLAIN, "refused": REFUSED, "leaves": LEAVES, "store": STORE}

#: Fragments show one thing only; these are the checkers that have something to say about it.
FRAGMENTS = {
    LEAVES_QUEUE: "I1 I2 I5 I10 I11 I19 I37",
    LANES: "I2 I6 I13 I14 I15 I16 I17 I18 I19 I20 I21",
    KEPT: "I32 I33",
    PREEMPTED: "I8 I17 I18 I20 I21 I22 I24",
    PARKED: "I2 I8 I9 I17 I20 I23",
    FAULT: "I2 I6 I8 I17 I18 I20 I21 I29 I30 I31",
    GIVEN_UP: "I28 I29 I30",
    DRAIN: "I1 I2 I26 I27 I28 I37",
}


def facts(rid: str, *, deadline_s: float = math.inf, valid: bool = True) -> RequestFacts:
    return RequestFacts(
        rid=rid,
        lane=Priority.NORMAL,
        prompt_tokens=3,
        prompt=(1, 2, 3),
        max_tokens=2,
        tokens=(7, 8),
        text="xy",
        reason="length",
        deadline_s=deadline_s,
        valid=valid,
    )


def run_of(text: str, *, deadline_s: float = math.inf, valid: bool = True) -> Run:
    """Requests a to e, all with the same answer; ``deadline_s`` and ``valid`` are about ``a``."""
    entries = parse(text)
    requests = {rid: facts(rid) for rid in "abcde"}
    requests["a"] = facts("a", deadline_s=deadline_s, valid=valid)
    faults = sum(entry.event in ("crashed", "engine_fault") for entry in entries)
    return Run(entries=entries, limits=LIMITS, requests=requests, max_step_s=0.1, faults=faults)
