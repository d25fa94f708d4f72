"""Ratios of alternating rounds, and servers as child processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from tools.bench_compare import best_of, main
from tools.benchkit.rounds import Contest, alternate, over_http, warm_up
from tools.benchkit.servers import ServerSpec, started
from tools.loadgen.client import open_client
from tools.loadgen.options import Options
from tools.loadgen.target import UsageError
from tools.measure_server import measure

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass
    def reply(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply({"data": [{"id": "m"}], "loop_lag": {"p99_ms": 1.5}})
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = request["max_tokens"]
        choice = {"message": {"content": "x"}, "finish_reason": "length"}
        self.reply({"choices": [choice], "usage": {"completion_tokens": tokens}})
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def figures(rate: float, tokens: int = 100, **more: Any) -> dict[str, Any]:
    return {"tokens_per_s": rate, "steady_tokens_per_s": None, "tokens": tokens, **more}


async def test_rounds_alternate_their_order_and_give_ratios() -> None:
    order: list[str] = []
    rates = iter([30.0, 10.0, 20.0, 50.0, 60.0, 15.0])

    def side(name: str) -> Any:
        async def run() -> dict[str, Any]:
            order.append(name)
            return figures(next(rates))

        return run

    contest = Contest(ours="a", theirs="b")
    await alternate(contest, side("a"), side("b"), rounds=3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert contest.ratios("tokens_per_s") == [3.0, 2.5, 4.0]
    result = contest.result()
    assert result["median_ratio"] == {"tokens_per_s": 3.0, "steady_tokens_per_s": None}
    assert result["warnings"] == []


def test_unequal_work_is_warned_of() -> None:
    contest = Contest(ours="a", theirs="b")
    contest.rows.append((figures(2.0), figures(1.0, tokens=80)))
    contest.rows.append((figures(2.0, problems=["1 of 8 requests failed"]), figures(1.0)))
    assert contest.warnings() == [
        "round 1: 100 against 80 tokens",
        "round 2: 1 of 8 requests failed",
    ]


def test_each_side_may_be_best_at_another_thread_count() -> None:
    one = Contest(ours="ours 1", theirs="theirs 1", rows=[(figures(5.0), figures(4.0))])
    two = Contest(ours="ours 2", theirs="theirs 2", rows=[(figures(3.0), figures(9.0))])
    assert best_of([one, two]) == {
        "ours": {"name": "ours 1", "tokens_per_s": 5.0},
        "theirs": {"name": "theirs 2", "tokens_per_s": 9.0},
    }


@pytest.mark.e2e
async def test_a_server_is_started_measured_and_stopped() -> None:
    spec = ServerSpec(name="fake", argv=(sys.executable, "-c", SERVER))
    load = Options(scenario="uniform", requests=6, concurrency=2, max_tokens=7, stream=False)
    with trio.fail_after(60):
        async with started(spec) as server:
            assert server.start_s > 0
            await warm_up([server], load)
            result = await over_http(server, load)()
            assert result["tokens"] == 42
            assert result["problems"] == []
            report = await measure(server.pid, load, server.target)
            assert report["server"]["tokens"] == 42
            assert report["server"]["all_threads_us_per_token"] > 0
            assert report["server"]["after"]["rss_bytes"] > 0
            assert report["server"]["loop_lag"] == {"p99_ms": 1.5}
        with pytest.raises(ProcessLookupError):
            os.kill(server.pid, 0)
        async with open_client(server.target, timeout_s=1.0) as client:
            assert (await client.get("/health")).error == "cannot connect: connection refused"


@pytest.mark.e2e
async def test_a_server_that_ends_at_once_is_named_with_its_last_words() -> None:
    script = "import sys; sys.exit('first line\\nno such model')"
    spec = ServerSpec(name="fake", argv=(sys.executable, "-c", script))
    with pytest.raises(UsageError, match=r"^fake did not start: no such model$"):
        async with started(spec):
            pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-32"], "needs a folder"),
        (["default-8", "--rounds", "0"], "at least 1"),
        (["default-8", "--json", "no/such/folder.json"], "no such folder"),
        (["nonsense"], "invalid choice"),
        (["default-8", "--rounds", "x"], "invalid int"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
