"""What a model can do with its KV caches, found out by running a few tokens when it is loaded.

Only what fails is found this way.  Models whose results would silently be wrong are listed.
"""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx

from models.mlx.batching import Caches, DecodeBatch, Row, arrays_of, can_batch, new_caches
from models.mlx.kv_quant import UnsupportedCaches

#: Modules of mlx-lm whose attention goes wrong for rows with padding before them, and why.
SOLO_ONLY: Final = {
    "afm7": "its last layers take positions from the number of columns",
    "gpt_bigcode": "its position embedding takes one position for the whole batch",
    "minimax_m3_vl": "its sparse attention picks blocks of columns, which padding shifts",
    "phi3small": "its sparse attention picks blocks of columns, which padding shifts",
}
#: The size of limited caches in the probe: the second chunk and the token behind it go over it.
PROBE_SIZE: Final = 8

# What models raise for inputs of an unexpected shape or kind.
FAULTS: Final = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def widest_batch(model: Any, **settings: Any) -> int | None:
    """1 if sequences must be decoded one by one, None if any number can be together.

    ``settings`` are those of ``new_caches``.
    """
    if type(model).__module__.rpartition(".")[2] in SOLO_ONLY:
        return 1
    rows = []
    for length in (2, 5):
        caches = new_caches(model, **settings)
        _run(model, [[0] * length], caches)
        rows.append(Row(sequence_id=length, caches=caches, length=length))
    if not can_batch(rows[0].caches):
        return 1
    batch = DecodeBatch()
    try:
        batch.change(join=rows)
        _run(model, [[0]] * len(rows), batch.caches)
    except FAULTS:
        return 1
    return None


def check_caches(model: Any, **settings: Any) -> None:
    """Raise UnsupportedCaches if the model cannot work with such caches.

    ``settings`` are those of ``new_caches``.  Models that read keys and values themselves cannot
    work with quantised ones (DeepSeek V3 and relatives), nor can attention with sinks; layers that
    read the cache of another layer cannot work with limited ones.
    """
    new_caches(model, **settings)  # whether the settings as such make sense
    limit = settings.get("max_kv_size")
    probed = {**settings, "max_kv_size": None if limit is None else min(limit, PROBE_SIZE)}
    try:
        caches = new_caches(model, **probed)
        for count in (2, PROBE_SIZE, 1):
            _run(model, [[0] * count], caches)
    except UnsupportedCaches:
        raise
    except FAULTS as fault:
        kind = "quantised" if limit is None else "limited"
        reason = str(fault).partition("\n")[0]
        message = f"this model cannot work with {kind} KV caches: {reason}"
        raise UnsupportedCaches(message) from fault


def _run(model: Any, tokens: list[list[int]], caches: Caches) -> None:
    mx.eval(model(mx.array(tokens, dtype=mx.uint32), cache=caches), arrays_of(caches))
