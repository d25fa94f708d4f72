"""create_app: ports and settings -> the ASGI application."""

from __future__ import annotations

from typing import cast

import trio
from quart_trio import QuartTrio

from actors.ports import Ports
from httpapi import error_handlers
from httpapi.asgi import ASGIApp
from httpapi.context import AppContext
from httpapi.routes import cache, chat, completions, health, models, props, slots
from httpapi.scope import RequestScope
from httpapi.settings import HttpSettings


def create_app(ports: Ports, settings: HttpSettings) -> ASGIApp:
    """A Quart-Trio application inside its RequestScope.  Nothing is started or awaited here."""
    app = QuartTrio("httpapi", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    app.config["BODY_TIMEOUT"] = settings.body_timeout_s
    app.config["RESPONSE_TIMEOUT"] = None  # the request's deadline and the DecodeLoop end it
    app.config["PROPAGATE_EXCEPTIONS"] = True  # RequestScope logs them and answers
    app.url_map.strict_slashes = False  # /v1/models/ is /v1/models ...
    app.url_map.merge_slashes = False  # ... and nothing is answered with a redirect
    error_handlers.install(app)
    context = AppContext(
        ports=ports, settings=settings, json_limiter=trio.CapacityLimiter(settings.json_threads)
    )
    for routes in (chat, completions, models, health, slots, props, cache):
        routes.add_routes(app, context)
    return RequestScope(cast(ASGIApp, app), ports, settings)
