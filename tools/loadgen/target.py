"""Which server is under load: URL checks and request bytes."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class UsageError(Exception):
    """The command line or the target is wrong; the text is one line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One resolved server; ``prefix`` is the path before ``/v1``, ``address`` is for connect."""

    host: str
    port: int
    prefix: str
    family: int
    address: tuple[Any, ...]
    api_key: str | None = None

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.prefix}"

    def request(self, method: str, path: str, body: bytes = b"", *, close: bool = False) -> bytes:
        """The bytes of one request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        if body or method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if close:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def resolve_target(base_url: str, *, api_key: str | None, allow_remote: bool) -> Target:
    """Check and resolve ``base_url``.  Raises UsageError.  The lookup blocks."""
    url = base_url if "://" in base_url else f"http://{base_url}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError as error:
        raise UsageError(f"--base-url {base_url}: {error}") from None
    if parts.scheme != "http" or not host:
        raise UsageError(f"--base-url {base_url}: expected http://host:port")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise UsageError("--api-key: only printable ASCII can be sent in a header")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"cannot resolve {host}: {error}") from None
    remote = [info[4][0] for info in found if not _is_loopback(str(info[4][0]))]
    if remote and not allow_remote:
        raise UsageError(f"{host} is not this machine ({remote[0]}); use --allow-remote to load it")
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    # /v1 is part of every path here, so both spellings of a base URL mean the same.
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    family, _, _, _, address = found[0]
    return Target(
        host=host, port=port, prefix=prefix, family=family, address=address, api_key=api_key
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%", 1)[0]).is_loopback


def chat_body(
    model: str, prompt: str, *, max_tokens: int, stream: bool, extra: Mapping[str, Any]
) -> bytes:
    """A chat completion request; ``extra`` holds sampling fields."""
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": stream,
        **extra,
    }
    if stream:
        fields["stream_options"] = {"include_usage": True}
    return json.dumps(fields).encode()
