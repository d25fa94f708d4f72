"""The embedded default model: real weights, real tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server import Server, running

pytestmark = [pytest.mark.e2e, pytest.mark.mlx, pytest.mark.real_model]

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server.wait_ready()


def ask(server: Server, **fields: Any) -> Any:
    status, body = server.chat(**({"temperature": 0, "max_tokens": 16} | fields))
    assert status == 200, body
    return body


def test_it_knows_the_capital_of_france(server: Server) -> None:
    body = ask(server, messages=CAPITAL)
    assert body["model"] == "SmolLM2-135M-Instruct"
    assert body["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert body["choices"][0]["finish_reason"] == "stop"


def test_together_they_answer_as_alone(server: Server) -> None:
    prompts = ["What is the capital of France?", "Count to five.", "Say hello.", "Name a colour."]
    batched: dict[str, str] = {}

    def one(prompt: str) -> str:
        content = ask(server, messages=[{"role": "user", "content": prompt}], max_tokens=12)
        text: str = content["choices"][0]["message"]["content"]
        return text

    threads = [
        threading.Thread(target=lambda p=p: batched.update({p: one(p)}))  # type: ignore[misc]
        for p in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert batched == {prompt: one(prompt) for prompt in prompts}


def test_a_stop_string_across_tokens_cuts_exactly(server: Server) -> None:
    body = ask(server, messages=CAPITAL, stop="of France is")
    assert body["choices"][0]["message"]["content"] == "The capital "
    assert body["choices"][0]["finish_reason"] == "stop"


def test_a_limit_inside_a_character_never_shows_a_replacement(server: Server) -> None:
    messages = [{"role": "user", "content": "Repeat exactly: 漢字 😀 नमस्ते"}]
    for limit in (1, 2, 3, 5, 8):
        body = ask(server, messages=messages, max_tokens=limit)
        assert "\ufffd" not in body["choices"][0]["message"]["content"]
        assert body["usage"]["completion_tokens"] <= limit


def test_the_late_system_message_reaches_the_model(server: Server) -> None:
    base = ask(server, messages=CAPITAL, max_tokens=1)["usage"]["prompt_tokens"]
    extra = [*CAPITAL, {"role": "system", "content": "Answer in one word, please."}]
    assert ask(server, messages=extra, max_tokens=1)["usage"]["prompt_tokens"] > base + 6


def test_the_start_up_log_names_the_choices(server: Server) -> None:
    log = "\n".join(server.lines)
    assert "float32" in log
    assert "threads" in log


def test_props_show_the_choices(server: Server) -> None:
    status, body = server.get("/props")
    assert status == 200
    assert json.dumps(body).count("float32") >= 1
