"""GET /v1/cache/stats and POST /v1/cache/reset: the prompt cache from outside."""

from __future__ import annotations

from functools import partial

from quart import Quart, Response

from actors.core.prefix_cache import CacheMemory, cache_stats
from httpapi.context import AppContext, json_response


def add_routes(app: Quart, context: AppContext) -> None:
    app.add_url_rule("/v1/cache/stats", "cache_stats", partial(_stats, context), methods=["GET"])
    app.add_url_rule("/v1/cache/reset", "cache_reset", partial(_reset, context), methods=["POST"])


async def _stats(context: AppContext) -> Response:
    stats = context.ports.cache_stats()
    if stats is None:  # while loading: nothing is kept, and the configured sizes are known
        stats = cache_stats(context.ports.limits.prompt_cache, CacheMemory(), None)
    return json_response(stats.as_dict())


async def _reset(context: AppContext) -> Response:
    cleared = await context.ports.clear_cache()
    return json_response(
        {
            "cleared": True,
            "freed_bytes": cleared.freed_bytes,
            "freed_entries": cleared.freed_entries,
        }
    )
