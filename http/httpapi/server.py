"""Sockets and Hypercorn.

The sockets are bound by the caller before anything else is started, so that a port in use is one
clear line, and passed on by descriptor, since only then can their options be set.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Sequence
from typing import Any, cast

import trio
from hypercorn.config import Config
from hypercorn.utils import repr_socket_addr, wrap_app

from httpapi.asgi import ASGIApp
from httpapi.connection import serve_listeners
from httpapi.settings import HttpSettings

logger = logging.getLogger("mlxcel.http.server")

#: A host name often resolves to an IPv6 address on machines without IPv6.
_FAMILY_MISSING = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


class BindError(Exception):
    """The address cannot be listened on; ``str()`` is one line for the operator."""


def bind_sockets(host: str, port: int, settings: HttpSettings) -> list[socket.socket]:
    """Listening sockets, one per address of ``host``; port 0 takes a free one for all of them.

    Connections queue up from here on.  Raises BindError.
    """
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, address in _addresses(host, port):
        if sockets:
            port = sockets[0].getsockname()[1]
        try:
            sockets.append(_listen(family, (address[0], port, *address[2:]), settings))
        except OSError as error:
            failure = error
            if error.errno not in _FAMILY_MISSING:
                break
    if failure is None or (sockets and failure.errno in _FAMILY_MISSING):
        return sockets
    for sock in sockets:
        sock.close()
    raise BindError(f"cannot listen on {host}:{port}: {failure.strerror}") from failure


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    if not 0 <= port <= 65535:
        raise BindError(f"cannot listen on {host}:{port}: a port is a number from 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise BindError(f"cannot listen on {host}:{port}: unknown host name") from None
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _listen(family: int, address: tuple[Any, ...], settings: HttpSettings) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Otherwise "::" would take the IPv4 port as well, or fail because it is taken.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Inherited by accepted connections.  Hypercorn shields its writes, so a peer that
            # stays connected and reads nothing could otherwise hold up the end of the process.
            milliseconds = int(settings.tcp_user_timeout_s * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        sock.bind(address)
        sock.listen(settings.backlog)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def hypercorn_config(settings: HttpSettings) -> Config:
    """Everything but the sockets."""
    config = Config()
    config.graceful_timeout = settings.graceful_timeout_s
    config.keep_alive_timeout = settings.keep_alive_timeout_s
    # Bounds heads that arrive in pieces; RequestScope checks all of them.
    config.h11_max_incomplete_size = settings.max_header_bytes
    config.backlog = settings.backlog
    config.accesslog = None  # RequestScope logs each request
    config.errorlog = logger
    config.include_server_header = False
    return config


async def serve_http(
    asgi_app: ASGIApp,
    sockets: Sequence[socket.socket],
    *,
    shutdown: trio.Event,
    settings: HttpSettings,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until ``shutdown`` is set, then let open exchanges end (``graceful_timeout_s``).

    Takes the sockets over: they are closed at the end.  ``task_status`` gets the served URLs.
    """
    config = hypercorn_config(settings)
    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in sockets]
    urls = [f"http://{repr_socket_addr(sock.family, sock.getsockname())}" for sock in sockets]
    app = wrap_app(cast(Any, asgi_app), config.wsgi_max_body_size, "asgi")
    task_status.started(urls)
    await serve_listeners(app, config, listeners, shutdown=shutdown)
