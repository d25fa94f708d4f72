"""GET /slots: one entry per slot, then one per request that waits for a slot."""

from __future__ import annotations

from functools import partial
from typing import Any

from quart import Quart, Response

from actors.errors import ErrorCode, RequestError
from actors.generation import LOADING_MESSAGE
from httpapi.context import AppContext, json_response

DISABLED_MESSAGE = "The slots endpoint is switched off on this server."


def add_routes(app: Quart, context: AppContext) -> None:
    app.add_url_rule("/slots", "slots", partial(_slots, context), methods=["GET"])


async def _slots(context: AppContext) -> Response:
    if not context.settings.slots_endpoint:
        raise RequestError(ErrorCode.NOT_SUPPORTED, DISABLED_MESSAGE)
    model = context.ports.model()
    if model is None:
        raise RequestError(ErrorCode.LOADING, LOADING_MESSAGE)
    snapshot = context.ports.status()
    # The contract has no state for prefill: a slot either works or does not.
    states = ["idle" if slot.request_id is None else "decoding" for slot in snapshot.slots]
    states += ["queued"] * snapshot.queue_depth
    entries: list[dict[str, Any]] = [
        {
            "id": number,
            "state": state,
            "model": context.model_name(),
            "context_size": model.context_length,
            "is_processing": state == "decoding",
        }
        for number, state in enumerate(states)
    ]
    return json_response(entries)
