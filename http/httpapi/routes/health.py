"""GET /health and /: whether a request sent now would be served, and what goes on inside.

200 ``ok``; 503 while loading, with no free slot, while draining, or when the engine is dead.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from quart import Quart, Response

from actors.phase import Phase
from actors.ports import RuntimeStatus
from httpapi.context import AppContext, json_response

TOOL_CALL_PARSER = "mlxcel"


def add_routes(app: Quart, context: AppContext) -> None:
    for number, path in enumerate(("/health", "/v1/health", "/")):
        app.add_url_rule(path, f"health_{number}", partial(_health, context), methods=["GET"])


async def _health(context: AppContext) -> Response:
    ports = context.ports
    model = ports.model()
    if ports.phase.phase is Phase.STARTING or model is None:
        return json_response({"status": "loading model", "tool_call_parser": None}, 503)
    snapshot = ports.status()
    status = _status(ports.phase.phase, snapshot)
    body: dict[str, Any] = {
        "status": status,
        "model": context.model_name(),
        "batch": {
            "active_sequences": snapshot.active,
            "queue_depth": snapshot.queue_depth,
            "max_batch_size": len(snapshot.slots),
        },
        "observability": _observability(snapshot),
        "context_size": model.context_length,
        "tool_call_parser": TOOL_CALL_PARSER if model.supports_tools else None,
        "phase": ports.phase.phase.value,
    }
    return json_response(body, 200 if status == "ok" else 503)


def _status(phase: Phase, snapshot: RuntimeStatus) -> str:
    if phase is not Phase.READY:
        return "draining"
    if not snapshot.engine_alive:
        return "engine dead"
    if snapshot.slots and snapshot.active == len(snapshot.slots):
        return "no slot available"
    return "ok"


def _observability(snapshot: RuntimeStatus) -> dict[str, Any]:
    return {
        "sequences_started": snapshot.sequences_started,
        "sequences_completed": snapshot.sequences_completed,
        "sequences_cancelled": snapshot.sequences_cancelled,
        "total_prefill_tokens": snapshot.prefill_tokens,
        "total_decode_tokens": snapshot.decode_tokens,
        "decode_steps_processed": snapshot.decode_steps,
        "prefill_chunks_processed": snapshot.prefill_chunks,
        "current_batch_size": snapshot.active,
        "cache_pool_active": snapshot.leases,
        "requests_refused": snapshot.requests_refused,
        "restarts": dict(snapshot.restarts),
    }
