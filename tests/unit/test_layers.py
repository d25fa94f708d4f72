"""Imports point downwards only, the cores stay pure, and http/ stays a plain folder."""

from __future__ import annotations

import ast
import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ["models", "actors", "httpapi", "runtime"]  # lowest first
FOLDERS = {name: ROOT / ("http/httpapi" if name == "httpapi" else name) for name in LAYERS}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downwards(layer: str) -> None:
    above = [*LAYERS[LAYERS.index(layer) + 1 :], "tools", "tests"]
    files = list(FOLDERS[layer].rglob("*.py"))
    assert len(files) > 1
    for path in files:
        for name in imports_of(path):
            assert name.split(".")[0] not in above, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("folder", ["actors/core", "http/httpapi/protocols"])
def test_cores_are_pure(folder: str) -> None:
    impure = {"trio", "quart", "quart_trio", "hypercorn", "random", "time", "uuid", "threading"}
    files = list((ROOT / folder).rglob("*.py"))
    assert len(files) > 1
    for path in files:
        for name in imports_of(path):
            assert name.split(".")[0] not in impure, f"{path.relative_to(ROOT)} imports {name}"


def test_http_is_a_source_root_that_hides_nothing() -> None:
    assert not (ROOT / "http" / "__init__.py").exists()
    assert "site-packages" not in (http.client.__file__ or "")
    assert ROOT not in Path(http.client.__file__).parents


def test_lock_files_carry_hashes_and_no_addresses() -> None:
    for path in (ROOT / "tools" / "lock").glob("*.txt"):
        text = path.read_text()
        assert "://" not in text
        requirements = [line for line in text.splitlines() if "==" in line]
        assert len(requirements) > 50
        assert text.count("--hash=sha256:") >= len(requirements)
