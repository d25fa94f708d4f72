"""Percentiles, steady throughput and the judgement of growth."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.loadgen.leavers import growth
from tools.loadgen.outcome import Outcome
from tools.loadgen.proc import ProcessSample
from tools.loadgen.stats import percentile, spread, steady_rate, summarise

values = st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1, max_size=50)


def stream(*stamps: float, started: float = 0.0) -> Outcome:
    return Outcome(status=200, started=started, ended=stamps[-1], stamps=array("d", stamps))


def test_percentiles_of_known_values() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile(list(map(float, range(101))), 90) == 90.0
    assert percentile([7.0], 99) == 7.0


@given(values)
def test_percentiles_rise_from_minimum_to_maximum(found: list[float]) -> None:
    ladder = [percentile(found, q) for q in (0, 10, 50, 90, 99, 100)]
    assert ladder[0] == min(found)
    assert ladder[-1] == max(found)
    assert all(a <= b + 1e-6 for a, b in pairwise(ladder))


def test_percentile_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match=r"0\.\.100"):
        percentile([1.0], 101)


def test_spread_scales_and_is_none_without_values() -> None:
    assert spread([]) is None
    found = spread([0.001, 0.003], scale=1000)
    assert found == {"count": 2, "mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98, "max": 3.0}


@pytest.mark.parametrize("skew", [0.0, 0.001, 0.4])
def test_steady_rate_of_streams_in_step(skew: float) -> None:
    # Eight streams, one token each per second, in bursts or spread over the second.
    streams = [stream(*(1.0 + i * skew / 8 + t for t in range(20))) for i in range(8)]
    peak, rate = steady_rate(streams)
    assert peak == 8
    assert rate == pytest.approx(8.0, rel=1e-6)


def test_steady_rate_leaves_out_start_and_tail() -> None:
    # Alone at 10 per second until 1.0 and after 2.0, together at 10 + 5 per second between.
    first = stream(*(i / 10 for i in range(31)))
    second = stream(*(1.0 + i / 5 for i in range(6)))
    peak, rate = steady_rate([first, second])
    assert peak == 2
    assert rate == pytest.approx(15.0)


def test_steady_rate_counts_tokens_where_the_usage_tells_them() -> None:
    found = stream(*map(float, range(11)))
    found.usage_tokens = 22
    assert steady_rate([found]) == (1, pytest.approx(2.0))


def test_steady_rate_without_streams() -> None:
    assert steady_rate([]) == (0, None)
    assert steady_rate([stream(1.0)]) == (0, None)


def test_summary_states_where_token_counts_come_from() -> None:
    by_usage = Outcome(status=200, ended=2.0, stamps=array("d", [1.0, 2.0]), usage_tokens=3)
    by_events = Outcome(status=200, ended=2.0, stamps=array("d", [1.0, 1.5]))
    assert summarise([by_usage], wall_s=2.0, cpu_s=0.1)["tokens"]["source"] == "usage"
    both = summarise([by_usage, by_events], wall_s=2.0, cpu_s=0.1)
    assert both["tokens"]["total"] == 5
    assert both["tokens"]["source"] == "usage, and content events where there is none"
    assert both["throughput"]["tokens_per_s"] == 2.5
    assert both["latency_ms"]["ttft"]["p50"] == 1000.0
    assert both["client"]["cpu_us_per_token"] == 20000.0


def resources(rss: int, fds: int, threads: int = 4) -> ProcessSample:
    return ProcessSample(rss_bytes=rss, fds=fds, threads=threads)


def test_growth_after_the_warm_up_is_named() -> None:
    flat = [(500, resources(100, 20)), (1000, resources(200, 30)), (9000, resources(209, 22))]
    assert growth(flat, warm_up=1000) == []
    leaky = [*flat, (10_000, resources(211, 45))]
    found = growth(leaky, warm_up=1000)
    assert len(found) == 2
    assert "rss_bytes grew from 200 to 211" in found[0]
    assert "fds grew from 30 to 45" in found[1]
    assert growth([], warm_up=1000) == ["too few samples to judge growth"]
