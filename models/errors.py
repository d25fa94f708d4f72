"""What can go wrong before a model serves anything."""

from __future__ import annotations


class ModelLoadError(Exception):
    """The model cannot be loaded.  ``str()`` is one line, for the person at the terminal."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
