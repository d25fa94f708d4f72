"""Strict reading of a JSON request body.

Stricter than ``json.loads``: NaN and Infinity are refused, also when they come from a number that
overflows (``1e999``), as are very deep nesting, very long integers and half surrogates; all of
them would otherwise fail much later, somewhere in a template or a tokenizer.  A key that occurs
twice counts as its last value, as everywhere.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from actors.errors import ErrorCode, RequestError

MAX_DEPTH = 128
MAX_INT_DIGITS = 64

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def invalid(message: str, param: str | None = None) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, message, param=param)


def parse_object(raw: bytes) -> dict[str, Any]:
    """The body's top-level object.  Raises RequestError (INVALID_REQUEST) for anything else."""
    if not raw.strip():
        raise invalid("The request body is empty; a JSON object is required.")
    value = _parse(raw)
    if not isinstance(value, dict):
        raise invalid("The request body must be a JSON object.")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if _SURROGATE_ESCAPE.search(raw) is not None:
        _check_surrogates(value)
    return value


def _parse(raw: bytes) -> Any:
    try:
        # utf-8-sig: a byte order mark is legal to ignore (RFC 8259, section 8.1).
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise invalid("The request body is not valid UTF-8.") from None
    try:
        return json.loads(text, parse_float=_float, parse_int=_int, parse_constant=_refuse_constant)
    except RecursionError:
        raise invalid("The request body is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise invalid(
            f"The request body is not valid JSON: {error.msg} "
            f"(line {error.lineno}, column {error.colno})."
        ) from None


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise invalid("The request body holds a number that is out of range.")
    return value


def _int(text: str) -> int:
    if len(text) > MAX_INT_DIGITS:
        raise invalid("The request body holds a number that is out of range.")
    return int(text)


def _refuse_constant(name: str) -> NoReturn:
    raise invalid(f"The request body is not valid JSON: {name} is not a JSON number.")


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise invalid("The request body is nested too deeply.")


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise invalid("The request body holds half of a surrogate pair.") from None
