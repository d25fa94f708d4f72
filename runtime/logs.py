"""Logging set-up: one line per event, as text or as one JSON object.

Records may carry ``extra={"fields": {...}}``; both formats print those.  Nothing that a client sent
(bodies, keys) is ever passed to a logger.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO


class TextFormatter(logging.Formatter):
    """``12:30:05 info  http: POST /v1/chat/completions status=200 ...``"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("mlxcel.")
        line = f"{clock} {record.levelname.lower():<7} {name}: {record.getMessage()}"
        fields = _fields(record)
        if fields:
            line += "".join(f" {key}={_plain(value)}" for key, value in fields.items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name.removeprefix("mlxcel."),
            "message": record.getMessage(),
        }
        entry.update(_fields(record))
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    shown = str(value)
    # A value with a space or a line break must not look like two fields or two log lines.
    return json.dumps(shown, ensure_ascii=False) if any(c.isspace() for c in shown) else shown


def configure_logging(level: str, fmt: str, stream: TextIO | None = None) -> None:
    """Route every logger to ``stream`` (standard error by default).  Idempotent."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if fmt == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries speak only when something is wrong, unless debugging was asked for.
    if level != "debug":
        for name in ("hypercorn", "quart", "httpx", "huggingface_hub", "urllib3", "transformers"):
            logging.getLogger(name).setLevel(logging.WARNING)
