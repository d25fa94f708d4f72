"""The one place that imports mlx-lm first.

Its utilities lower the process's limit of open files to 2048 (and the hard limit for good) when
they are imported, and fail where the hard limit is below 4096.  A server needs its sockets, so the
call is kept from having an effect.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def mlx_lm_utils() -> ModuleType:
    """``mlx_lm.utils``, with the limits of the process left alone."""
    loaded = sys.modules.get("mlx_lm.utils")
    if loaded is not None:
        return loaded
    import resource

    real = resource.setrlimit

    def ignore(*_: Any) -> None: ...

    resource.setrlimit = ignore
    try:
        return importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = real
