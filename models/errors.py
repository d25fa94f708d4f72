"""What can go wrong before a model serves anything."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_CHARS: Final = 600


class ModelLoadError(Exception):
    """The model cannot be loaded.  ``str()`` is one line, for the person at the terminal.

    Messages quote names from files, so they are cut and cleaned of control characters.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        clean = "".join(char if char.isprintable() else "?" for char in line)
        if len(clean) > MAX_MESSAGE_CHARS:
            clean = clean[:MAX_MESSAGE_CHARS] + "..."
        super().__init__(clean)
