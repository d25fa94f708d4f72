"""What a setting is, and how the text of a flag or an environment variable becomes its value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Parse = Callable[[str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """``dest`` is the field of ServerConfig; ``parse`` raises ValueError with a short reason.

    ``const`` makes the flags switches that store it; ``env`` variables are still parsed.
    """

    dest: str
    flags: tuple[str, ...]
    group: str
    help: str
    default: Any
    parse: Parse
    metavar: str = "VALUE"
    env: tuple[str, ...] = ()
    const: Any = None


def boolean(text: str) -> bool:
    match text.strip().lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off":
            return False
    raise ValueError("expected true or false")


def integer(minimum: int, maximum: int = 2**63 - 1) -> Parse:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("expected a whole number") from None
        if not minimum <= value <= maximum:
            bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            raise ValueError(f"must be {bound}")
        return value

    return parse


def number(minimum: float, maximum: float = math.inf) -> Parse:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("expected a number") from None
        if not math.isfinite(value):
            raise ValueError("must be finite")
        if not minimum <= value <= maximum:
            bound = f"at least {minimum:g}" if value < minimum else f"at most {maximum:g}"
            raise ValueError(f"must be {bound}")
        return value

    return parse


def seconds_or_off(text: str) -> float | None:
    """-1 switches the thing off."""
    value = number(-1.0)(text)
    if value == -1.0:
        return None
    if value <= 0:
        raise ValueError("must be positive, or -1 for off")
    return float(value)


def choice(*names: str) -> Parse:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError("expected one of " + ", ".join(names))
        return text

    return parse


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def size_bytes(value: str) -> int:
    """Bytes, or a number with K, M or G (also KB, MB, GB), times 1024."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    stripped = value.strip().upper().removesuffix("B")
    unit = stripped[-1:] if stripped[-1:] in ("K", "M", "G") else ""
    try:
        count = float(stripped.removesuffix(unit))
    except ValueError:
        raise ValueError("expected a size such as 512M or 8G") from None
    result = count * units[unit]
    if not math.isfinite(result) or result < 1:
        raise ValueError("must be a positive size")
    return int(result)


def auto_or(parse: Parse) -> Parse:
    """``auto`` becomes None."""

    def parse_auto(value: str) -> Any:
        return None if value == "auto" else parse(value)

    return parse_auto


def kv_budget(value: str) -> int | str:
    if value in ("auto", "none"):
        return value
    return size_bytes(value)


def sampling_seed(value: str) -> int | None:
    """-1 means random."""
    parsed: int = integer(-1, 2**64 - 1)(value)
    return None if parsed == -1 else parsed


def alias_list(value: str) -> str:
    """The first name of the sorted comma list is served."""
    names = sorted(name.strip() for name in value.split(",") if name.strip())
    if not names:
        raise ValueError("must name at least one alias")
    return names[0]


def memory_budget(value: str) -> int:
    """A size; there is no way to say "none", since the budget can only lower what is allowed."""
    if value.strip().lower() in ("0", "none"):
        raise ValueError("must be a positive size such as 12G; leave it unset for no bound")
    return size_bytes(value)


def megabytes(value: str) -> int:
    """Mebibytes as bytes; -1 (no bound) and 0 (off) stay what they are."""
    count: int = integer(-1, 2**40)(value)
    return count if count <= 0 else count * 2**20


def loop_detection(value: str) -> tuple[int, int, int]:
    """(min, max, count); (0, 0, 0) is off."""
    match value.strip().lower():
        case "off":
            return 0, 0, 0
        case "on":
            return 1, 20, 4
    try:
        low, high, count = (int(part) for part in value.split(","))
    except ValueError:
        raise ValueError("expected on, off or three whole numbers MIN,MAX,COUNT") from None
    if min(low, high, count) < 0:
        raise ValueError("must not be negative")
    return low, high, count
