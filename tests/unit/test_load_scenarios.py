"""Each scenario against a small server on loopback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.unit.load_server import FakeServer, running
from tools.load import SCENARIOS, main, run_scenario
from tools.loadgen.options import Options, parse_options
from tools.loadgen.outcome import Outcome
from tools.loadgen.report import write_json, write_plot
from tools.loadgen.target import UsageError, resolve_target

pytestmark = pytest.mark.e2e


async def load(server: FakeServer, scenario: str, **options: Any) -> dict[str, Any]:
    report, _ = await load_outcomes(server, scenario, **options)
    return report


async def load_outcomes(
    server: FakeServer, scenario: str, **options: Any
) -> tuple[dict[str, Any], list[Outcome]]:
    target = resolve_target(server.url, api_key=None, allow_remote=False)
    with trio.fail_after(30):
        return await run_scenario(Options(scenario=scenario, **options), target)


async def test_uniform_counts_tokens_and_reuses_connections() -> None:
    async with running(FakeServer()) as server:
        report = await load(server, "uniform", concurrency=3, requests=9, max_tokens=5)
        assert report["requests"]["ok"] == 9
        assert report["tokens"]["total"] == report["tokens"]["content_events"] == 45
        assert report["tokens"]["source"] == "usage"
        assert report["tokens"]["finish_reasons"] == {"length": 9}
        assert report["latency_ms"]["ttft"]["count"] == 9
        assert report["latency_ms"]["itl"]["count"] == 36
        assert report["verdict"] == {"ok": True, "problems": []}
        assert server.connections == 3
        assert server.most <= 3
        prompts = {r["messages"][0]["content"] for r in server.requests}
        assert len(prompts) == 9


async def test_preconnect_opens_connections_before_the_load() -> None:
    async with running(FakeServer()) as server:
        report = await load(server, "uniform", concurrency=4, requests=4, preconnect=True)
        assert report["requests"]["ok"] == 4
        assert server.connections == 4


async def test_options_reach_the_request() -> None:
    async with running(FakeServer(close_delimited=True)) as server:
        options = {"ignore_eos": True, "temperature": 0.5, "prompt": "Hi", "same_prompt": True}
        report = await load(
            server, "uniform", concurrency=2, requests=2, max_tokens=3, keep_alive=False, **options
        )
        assert report["requests"]["ok"] == 2
        request = server.requests[0]
        assert request["model"] == "fake"
        assert request["ignore_eos"] is True
        assert request["temperature"] == 0.5
        assert request["messages"] == [{"role": "user", "content": "Hi"}]
        assert request["stream_options"] == {"include_usage": True}
        # One more for the list of models.
        assert server.connections == 3


async def test_plain_responses_are_counted_by_usage() -> None:
    async with running(FakeServer()) as server:
        report = await load(server, "uniform", requests=4, max_tokens=6, stream=False)
        assert report["tokens"]["total"] == 24
        assert report["latency_ms"]["ttft"] is None
        assert report["latency_ms"]["e2e"]["count"] == 4


async def test_mixed_reports_each_kind_of_sampling() -> None:
    async with running(FakeServer()) as server:
        report = await load(server, "mixed", concurrency=4, requests=16, max_tokens=3)
        kinds = report["details"]["by_sampling"]
        assert {kind["requests"] for kind in kinds.values()} == {2}
        assert {r.get("top_k") for r in server.requests} == {None, 40, 50, 100}
        assert len({r["seed"] for r in server.requests}) == 8
        assert sum(r.get("top_logprobs") == 5 for r in server.requests) == 4


async def test_shared_prefix_sends_one_cold_request_first() -> None:
    async with running(FakeServer()) as server:
        report = await load(server, "shared-prefix", requests=6, max_tokens=2, prompt_tokens=50)
        prompts = [r["messages"][0]["content"] for r in server.requests]
        assert len({p.split("\n")[0] for p in prompts}) == 1
        assert len(set(prompts)) == 7
        assert report["details"]["cold"]["requests"] == 1
        assert report["details"]["warm"]["ok"] == 6


async def test_overload_counts_refusals_as_expected_answers() -> None:
    async with running(FakeServer(slots=3, gap_s=0.02)) as server:
        report = await load(server, "overload", requests=20, max_tokens=10)
        details = report["details"]
        assert details["served"] + details["refused"] == 20
        assert details["refused"] >= 1
        assert report["requests"]["by_status"]["503"] == details["refused"]
        assert report["requests"]["retry_after"] == {"2": details["refused"]}
        assert report["verdict"]["ok"]


async def test_overload_wants_retry_after() -> None:
    async with running(FakeServer(slots=1, gap_s=0.02, retry_after=False)) as server:
        report = await load(server, "overload", requests=5, max_tokens=10)
        assert any("Retry-After" in p for p in report["verdict"]["problems"])


async def test_cancel_leaves_in_every_way_and_finds_the_server_idle() -> None:
    async with running(FakeServer(gap_s=0.002)) as server:
        report, outcomes = await load_outcomes(
            server, "cancel", concurrency=8, requests=60, max_tokens=20, cancel_share=0.9, seed=3
        )
        behaviours = set(report["details"]["by_behaviour"])
        for moment in ("before first byte", "mid-stream", "plain"):
            for way in ("fin", "reset", "half_close"):
                assert f"{moment}, {way}" in behaviours
        assert report["requests"]["left"] > 20
        assert report["requests"]["failed"] == 0
        assert report["verdict"]["ok"], report["verdict"]
        assert server.left > 0
        partial = [o for o in outcomes if o.left and o.label.startswith("mid-stream")]
        assert all(0 < len(o.stamps) < 20 for o in partial)


async def test_the_same_seed_makes_the_same_requests() -> None:
    bodies = []
    for _ in range(2):
        async with running(FakeServer()) as server:
            await load(server, "cancel", concurrency=1, requests=10, cancel_share=0.0, seed=5)
            bodies.append(server.requests)
    assert bodies[0] == bodies[1]


async def test_a_server_that_keeps_working_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(FakeServer()) as server:
        server.active = 1
        report = await load(server, "newcomer", concurrency=2, repeats=1, idle_within_s=0.1)
        assert any("active_sequences is 1" in p for p in report["verdict"]["problems"])


async def test_newcomer_compares_with_an_idle_server() -> None:
    async with running(FakeServer(gap_s=0.001)) as server:
        report = await load(server, "newcomer", concurrency=4, repeats=2, max_tokens=2000)
        assert report["details"]["ratio"] > 0
        assert report["details"]["newcomer_ttft_ms"]["count"] == 2
        assert report["verdict"]["ok"], report["verdict"]
        assert max(r["max_tokens"] for r in server.requests) == 2000
        assert server.left >= 8


async def test_long_prompt_reports_the_stall_of_each_stream() -> None:
    async with running(FakeServer(gap_s=0.005)) as server:
        report = await load(
            server, "long-prompt", concurrency=2, max_tokens=60, long_prompt_tokens=100
        )
        stalls = report["details"]["stalls"]
        assert {row["label"] for row in stalls} == {"stream 0", "stream 1"}
        assert all(row["stall_ms"] >= row["usual_itl_ms"] / 2 for row in stalls)
        assert report["verdict"]["ok"], report["verdict"]
        longest = max(len(r["messages"][0]["content"].split()) for r in server.requests)
        assert longest >= 100


async def test_soak_samples_the_process() -> None:
    async with running(FakeServer()) as server:
        report = await load(
            server, "soak", requests=60, concurrency=4, pid=os.getpid(), max_tokens=3
        )
        samples = report["details"]["samples"]
        assert samples[-1]["requests"] == 60
        assert all(s["rss_bytes"] > 0 and s["fds"] > 0 and s["threads"] > 0 for s in samples)


async def test_an_error_event_fails_the_request() -> None:
    async with running(FakeServer(error_event=True)) as server:
        report = await load(server, "uniform", requests=2, concurrency=2, max_tokens=5)
        assert report["requests"]["errors"] == {"error event: the batch was lost": 2}
        assert not report["verdict"]["ok"]


async def test_a_silent_server_times_out() -> None:
    async with running(FakeServer(silent=True)) as server:
        report = await load(server, "uniform", requests=2, concurrency=2, timeout_s=0.2)
        assert report["requests"]["errors"] == {"timed out after 0.2 s": 2}


async def test_the_whole_run_is_bounded() -> None:
    async with running(FakeServer(silent=True)) as server:
        report = await load(server, "uniform", requests=2, max_time_s=0.2)
        assert report["verdict"]["problems"] == ["stopped after --max-time 0.2 s"]


async def test_report_and_plot_are_written(tmp_path: Path) -> None:
    async with running(FakeServer()) as server:
        report, outcomes = await load_outcomes(
            server, "uniform", requests=4, max_tokens=4, json_out=tmp_path / "x.json", api_key="k"
        )
    write_json(tmp_path / "x.json", report)
    loaded = json.loads((tmp_path / "x.json").read_text())
    assert loaded["schema"] == "mlxcel-load/1"
    assert set(loaded) == {
        "schema",
        "scenario",
        "target",
        "options",
        "wall_s",
        "requests",
        "tokens",
        "throughput",
        "latency_ms",
        "client",
        "details",
        "verdict",
    }
    assert loaded["options"]["api_key"] is True
    assert set(loaded["latency_ms"]["itl"]) == {"count", "mean", "p50", "p90", "p99", "max"}
    write_plot(tmp_path / "x.png", "title", outcomes)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    write_plot(tmp_path / "empty.png", "title", [])
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "http://127.0.0.1:1"], "connection refused"),
        (["--base-url", "http://192.0.2.1:80"], "--allow-remote"),
        (["--base-url", "ftp://127.0.0.1"], "expected http://host:port"),
        (["--base-url", "http://127.0.0.1:99999"], "--base-url"),
        (["nonsense"], "invalid choice"),
        (["--requests", "0"], "must be within"),
        (["--concurrency", "many"], "not a whole number"),
        (["--temperature", "nan"], "must be within"),
        (["--json", "no/such/folder/x.json"], "no such folder"),
        (["--api-key", "a\nb"], "printable"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--no-progress"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_scenario_can_be_a_flag() -> None:
    names = tuple(SCENARIOS)
    assert parse_options(["--scenario", "soak"], names).scenario == "soak"
    assert parse_options([], names).scenario == "uniform"
    with pytest.raises(UsageError):
        parse_options(["--scenario", "other"], names)


def test_base_url_with_version_means_the_same() -> None:
    plain = resolve_target("http://127.0.0.1:9/p", api_key=None, allow_remote=False)
    assert resolve_target("http://127.0.0.1:9/p/v1/", api_key=None, allow_remote=False) == plain
    assert plain.base_url == "http://127.0.0.1:9/p"
    assert resolve_target("[::1]:9", api_key=None, allow_remote=False).base_url == "http://[::1]:9"
