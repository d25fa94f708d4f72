"""The two tools for looking at runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.journals import LEAVES, PLAIN
from tests.sim.notation import parse
from tests.sim.world import run_world
from tools import sim, trace

pytestmark = pytest.mark.sim


def test_a_journal_survives_the_file() -> None:
    entries = run_world(3).journal
    assert trace.from_jsonl(trace.to_jsonl(entries)) == entries


def test_the_story_of_a_request() -> None:
    lines = list(trace.story(parse(LEAVES), "a"))
    assert lines[0] == "request a (from 0.0000 s)"
    assert "   +0.0000  decode            step 1: prefill 3 tokens, 3 tokens in all" in lines
    assert "   +0.1000  decode            step 2: decode, 1 tokens in all" in lines
    assert lines[-1].endswith("lease_released lease=1 leased_tokens=0")


def test_the_timeline_shows_each_time_once() -> None:
    lines = list(trace.timeline(parse(PLAIN)))
    assert [line[:10].strip() for line in lines if line[:10].strip()] == [
        "0.0000",
        "0.1000",
        "0.2000",
        "1.0000",
    ]


def test_trace_reads_what_sim_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal.jsonl"
    assert sim.main(["--seed", "3", "--dump", str(path)]) == 0
    assert "seed 3: " in capsys.readouterr().out
    assert trace.main([str(path), "--request", "r01"]) == 0
    assert "client_sent lane=" in capsys.readouterr().out
    assert trace.main([str(path), "--request", "nobody"]) == 2


def test_trace_refuses_what_is_no_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('[0.0, "decode", "planned", [1]]\n')
    assert trace.main([str(path)]) == 2
    assert "line 1" in capsys.readouterr().err


def test_sim_counts_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim.main(["--seed", "0", "--count", "3"]) == 0
    assert "3 seeds, 0 failed" in capsys.readouterr().out
