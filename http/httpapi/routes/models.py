"""GET /v1/models: the one model that is served."""

from __future__ import annotations

from functools import partial

from quart import Quart, Response

from actors.errors import ErrorCode, RequestError
from actors.generation import LOADING_MESSAGE
from httpapi.context import AppContext, json_response


def add_routes(app: Quart, context: AppContext) -> None:
    for number, path in enumerate(("/v1/models", "/models")):
        app.add_url_rule(path, f"models_{number}", partial(_models, context), methods=["GET"])


async def _models(context: AppContext) -> Response:
    model = context.ports.model()
    if model is None:
        raise RequestError(ErrorCode.LOADING, LOADING_MESSAGE)
    entry = {
        "id": context.model_name(),
        "object": "model",
        "created": model.created_s,
        "owned_by": "user",
    }
    return json_response({"object": "list", "data": [entry]})
