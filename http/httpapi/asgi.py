"""ASGI as this package uses it: type aliases and the key of the request's record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Where RequestScope puts the RequestRecord into the ASGI scope.
RECORD_KEY = "mlxcel.record"
