from __future__ import annotations

from dataclasses import replace

import pytest

from actors.phase import Phase
from tests.http.asgi_client import fetch
from tests.http.fakes import BUSY, IDLE, MODEL, FakeRuntime


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
async def test_models(runtime: FakeRuntime, path: str) -> None:
    reply = await fetch(runtime.app, "GET", path)
    assert reply.json() == {
        "object": "list",
        "data": [
            {"id": "tiny-chat", "object": "model", "created": 1_700_000_000, "owned_by": "user"}
        ],
    }


async def test_alias_names_the_model_everywhere() -> None:
    runtime = FakeRuntime(alias="front")
    assert (await fetch(runtime.app, "GET", "/v1/models")).json()["data"][0]["id"] == "front"
    assert (await fetch(runtime.app, "GET", "/health")).json()["model"] == "front"
    assert (await fetch(runtime.app, "GET", "/slots")).json()[0]["model"] == "front"


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/"])
async def test_health_when_ready(runtime: FakeRuntime, path: str) -> None:
    reply = await fetch(runtime.app, "GET", path)
    assert reply.status == 200
    assert reply.json() == {
        "status": "ok",
        "model": "tiny-chat",
        "batch": {"active_sequences": 0, "queue_depth": 0, "max_batch_size": 2},
        "observability": {
            "sequences_started": 3,
            "sequences_completed": 2,
            "sequences_cancelled": 1,
            "total_prefill_tokens": 40,
            "total_decode_tokens": 50,
            "decode_steps_processed": 60,
            "prefill_chunks_processed": 4,
            "current_batch_size": 0,
            "cache_pool_active": 0,
            "requests_refused": 5,
            "restarts": {"pipeline": 1},
        },
        "context_size": 4096,
        "tool_call_parser": None,
        "phase": "ready",
    }


async def test_health_while_loading(runtime: FakeRuntime) -> None:
    runtime.phase.phase = Phase.STARTING
    runtime.model = None
    reply = await fetch(runtime.app, "GET", "/health")
    assert reply.status == 503
    assert reply.json() == {"status": "loading model", "tool_call_parser": None}
    models = await fetch(runtime.app, "GET", "/v1/models")
    assert models.status == 503
    assert models.error()["type"] == "server_busy"


async def test_health_without_a_free_slot(runtime: FakeRuntime) -> None:
    ready = (await fetch(runtime.app, "GET", "/health")).json()
    runtime.status = BUSY
    reply = await fetch(runtime.app, "GET", "/health")
    assert reply.status == 503
    body = reply.json()
    assert body["status"] == "no slot available"
    assert set(body) == set(ready)
    assert body["batch"] == {"active_sequences": 2, "queue_depth": 2, "max_batch_size": 2}


async def test_health_with_a_dead_engine_or_draining(runtime: FakeRuntime) -> None:
    runtime.status = replace(IDLE, engine_alive=False, restarts={"pipeline": 3})
    reply = await fetch(runtime.app, "GET", "/health")
    assert (reply.status, reply.json()["status"]) == (503, "engine dead")
    assert reply.json()["observability"]["restarts"] == {"pipeline": 3}
    runtime.phase.phase = Phase.DRAINING
    reply = await fetch(runtime.app, "GET", "/health")
    assert (reply.status, reply.json()["status"]) == (503, "draining")
    assert reply.json()["phase"] == "draining"


async def test_tool_call_parser_follows_the_template(runtime: FakeRuntime) -> None:
    runtime.model = replace(MODEL, supports_tools=True)
    assert (await fetch(runtime.app, "GET", "/health")).json()["tool_call_parser"] == "mlxcel"


async def test_slots_with_waiting_requests(runtime: FakeRuntime) -> None:
    runtime.status = replace(BUSY, slots=(BUSY.slots[0], IDLE.slots[1]), queue_depth=1)
    reply = await fetch(runtime.app, "GET", "/slots")
    common = {"model": "tiny-chat", "context_size": 4096}
    assert reply.json() == [
        {"id": 0, "state": "decoding", "is_processing": True, **common},
        {"id": 1, "state": "idle", "is_processing": False, **common},
        {"id": 2, "state": "queued", "is_processing": False, **common},
    ]


async def test_slots_can_be_switched_off() -> None:
    reply = await fetch(FakeRuntime(slots_endpoint=False).app, "GET", "/slots")
    assert reply.status == 501
    assert reply.error()["type"] == "not_supported_error"


async def test_props(runtime: FakeRuntime) -> None:
    body = (await fetch(runtime.app, "GET", "/props")).json()
    assert body["total_slots"] == 2
    assert body["engine"] == {"device": "cpu", "dtype": "float32"}
    settings = body["default_generation_settings"]
    assert settings["seed"] == 18446744073709551615
    assert (settings["temperature"], settings["n_predict"]) == (0.8, -1)
    assert len(settings) == 18


async def test_props_answers_while_loading(runtime: FakeRuntime) -> None:
    runtime.model = None
    reply = await fetch(runtime.app, "GET", "/props")
    assert reply.status == 200
    assert reply.json()["total_slots"] == 2


async def test_request_ids_differ(runtime: FakeRuntime) -> None:
    replies = [await fetch(runtime.app, "GET", "/health") for _ in range(3)]
    ids = {reply.headers["x-request-id"] for reply in replies}
    assert len(ids) == 3
    assert all(request_id.startswith("req-") for request_id in ids)
