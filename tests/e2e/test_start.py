"""Bad starts: one clear line, exit code 2, no traceback."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.e2e.server import run_to_end

pytestmark = pytest.mark.e2e


def assert_refused(*flags: str, words: list[str], env: dict[str, str] | None = None) -> None:
    ended = run_to_end(*flags, env=env)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    errors = [line for line in ended.stderr.splitlines() if "error" in line]
    assert len(errors) == 1, ended.stderr
    for word in words:
        assert word in errors[0], errors[0]


def test_bad_flag_value() -> None:
    assert_refused("--port", "eighty", words=["--port", "eighty"])


def test_unknown_flag() -> None:
    assert_refused("--no-such-flag", words=["--no-such-flag"])


def test_bad_environment_value() -> None:
    assert_refused(words=["LLAMA_ARG_PORT", "eighty"], env={"LLAMA_ARG_PORT": "eighty"})


def test_model_path_that_does_not_exist(tmp_path: Path) -> None:
    missing = tmp_path / "nothing.gguf"
    assert_refused("--port", "0", "-m", str(missing), words=[str(missing)])


def test_folder_without_a_model(tmp_path: Path) -> None:
    assert_refused("--port", "0", "-m", str(tmp_path), words=["config.json"])


def test_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "picture.gguf"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(500))
    assert_refused("--port", "0", "-m", str(path), words=["picture.gguf", "GGUF"])


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_refused("--port", port, words=[port, "in use"])


def test_host_that_is_not_ours() -> None:
    assert_refused("--port", "0", "--host", "192.0.2.1", words=["192.0.2.1"])
