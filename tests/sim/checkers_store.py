"""I34-I35: stored responses, seen through what the world put in and got out.

The world writes ``probe`` entries: ``store_put`` (id, size, stored), ``store_get`` (id, size
or -1), ``store_delete`` (id, there) and ``store_size`` (entries, bytes).
"""

from __future__ import annotations

from tests.sim.run import EPSILON_S, CheckFailed, Run


def nothing_expired(run: Run) -> None:
    """I34: what was never stored, was deleted or has expired is never returned."""
    stored: dict[str, tuple[float, int]] = {}  # id -> (time, size)
    for _, entry in run.having("probe"):
        name, value = entry["name"], entry["value"]
        if name == "store_put" and value[2]:
            stored[value[0]] = (entry.time_s, value[1])
        elif name in ("store_put", "store_delete"):
            stored.pop(value[0], None)
        elif name == "store_get" and value[1] >= 0:
            since_s, size = stored.get(value[0], (float("-inf"), -1))
            if size != value[1]:
                raise CheckFailed("I34", f"{size} bytes were stored", at=entry, rid=value[0])
            if entry.time_s > since_s + run.limits.store_ttl_s + EPSILON_S:
                raise CheckFailed("I34", f"stored at {since_s}", at=entry, rid=value[0])


def within_bounds(run: Run) -> None:
    """I35: the store stays within its entries and bytes."""
    for _, entry in run.having("probe"):
        if entry["name"] != "store_size":
            continue
        entries, size = entry["value"]
        if entries > run.limits.store_max_entries or size > run.limits.store_max_bytes:
            raise CheckFailed("I35", f"{entries} entries, {size} bytes", at=entry)
