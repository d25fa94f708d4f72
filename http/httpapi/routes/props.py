"""GET /props: default generation settings, and the choices made when the model was loaded."""

from __future__ import annotations

from functools import partial
from typing import Any

from quart import Quart, Response

from httpapi.context import AppContext, json_response
from httpapi.settings import GenerationDefaults

#: How the contract writes a seed that is drawn per request.
RANDOM_SEED = 2**64 - 1


def add_routes(app: Quart, context: AppContext) -> None:
    app.add_url_rule("/props", "props", partial(_props, context), methods=["GET"])


async def _props(context: AppContext) -> Response:
    model = context.ports.model()
    body: dict[str, Any] = {
        "default_generation_settings": _defaults(context.settings.defaults),
        "total_slots": len(context.ports.status().slots),
    }
    if model is not None:
        body["model"] = context.model_name()
        body["context_size"] = model.context_length
        body["vocab_size"] = model.vocab_size
        body["engine"] = dict(model.notes)
        body["step_cost"] = dict(context.ports.status().step_cost)
    if lag := dict(context.ports.loop_lag()):
        body["loop_lag"] = lag
    return json_response(body)


def _defaults(defaults: GenerationDefaults) -> dict[str, Any]:
    return {
        "n_predict": defaults.n_predict,
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "typical_p": defaults.typical_p,
        "top_n_sigma": defaults.top_n_sigma,
        "xtc_probability": defaults.xtc_probability,
        "xtc_threshold": defaults.xtc_threshold,
        "repeat_penalty": defaults.repetition_penalty,
        "repeat_last_n": defaults.penalty_window,
        "seed": RANDOM_SEED if defaults.seed is None else defaults.seed,
        "frequency_penalty": defaults.frequency_penalty,
        "presence_penalty": defaults.presence_penalty,
        "dry_multiplier": defaults.dry_multiplier,
        "dry_base": defaults.dry_base,
        "dry_allowed_length": defaults.dry_allowed_length,
        "dry_penalty_last_n": defaults.dry_window,
    }
