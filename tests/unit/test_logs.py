from __future__ import annotations

import io
import json
import logging

import pytest

from runtime.logs import configure_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> object:
    root = logging.getLogger()
    saved = root.handlers[:], root.level
    yield
    root.handlers[:], level = saved
    root.setLevel(level)


def test_text_lines_show_fields_and_cannot_be_forged() -> None:
    out = io.StringIO()
    configure_logging("info", "text", out)
    logging.getLogger("mlxcel.http").info("done", extra={"fields": {"path": "/a b\nX", "s": 1.5}})
    line = out.getvalue()
    assert line.count("\n") == 1
    assert 'http: done path="/a b\\nX" s=1.5' in line


def test_json_lines_are_objects() -> None:
    out = io.StringIO()
    configure_logging("info", "json", out)
    logging.getLogger("mlxcel.serve").info("ready", extra={"fields": {"port": 8080}})
    entry = json.loads(out.getvalue())
    assert (entry["logger"], entry["message"], entry["port"]) == ("serve", "ready", 8080)


def test_the_level_holds() -> None:
    out = io.StringIO()
    configure_logging("error", "text", out)
    logging.getLogger("mlxcel.x").warning("quiet")
    assert out.getvalue() == ""
