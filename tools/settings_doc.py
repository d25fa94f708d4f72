"""Write ``docs/settings.md`` from the settings table; ``--check`` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from runtime.config import MIN_SLOT_CONTEXT
from runtime.setting_types import Setting
from runtime.settings_table import SETTINGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

INTRO = """# Settings

Order of precedence: command line flags, then environment variables, then defaults. An empty
environment variable counts as unset. A bad value of either kind ends the start with one line and
exit code 2. Sizes are bytes or a number with K, M or G (times 1024). This page is made by
`python tools/settings_doc.py`; a test compares it with the program.
"""

NOTES = f"""
## Notes

- **Slots and context.** `--ctx-size` is shared: each of the `--parallel` slots gets
  `floor(ctx-size / parallel)` tokens for prompt and completion together. Fewer than
  {MIN_SLOT_CONTEXT} per slot stops the start. Without it every slot has the model's own context.
- **Places.** The server holds `parallel + max-queue-depth` requests at once. One more gets 503
  `server_busy` with `Retry-After`, before any work is done for it.
- **KV budget.** A request reserves its prompt plus the most tokens that it may generate. While the
  budget is taken it waits in the queue; what could never fit is refused with 400. `auto` is the
  memory available at load.
- **BLAS threads.** On the CPU backend every BLAS thread waits for the slowest one, so a thread that
  shares its core with another program slows all of them. `auto` therefore leaves one core free
  and measures the rest, unless `OPENBLAS_NUM_THREADS` or `OMP_NUM_THREADS` is set.
- **Prefill chunks.** `auto` measures the cost of a decode step and of a prompt token and sizes the
  chunk so that running streams wait for about three decode steps; without running streams the
  chunk is as large as allowed.
- `MLXCEL_CACHE_DIR` (default `~/.cache/mlxcel`) is the parent of the model store.
  `MLXCEL_DEFAULT_ORG` (default `mlx-community`) completes a bare model name.

## Exit codes

| Code | Meaning |
|---|---|
| 0 | stopped by SIGTERM or SIGINT; what still ran after `--drain-timeout` was failed |
| 1 | stopped at once by a second signal |
| 2 | bad flag, environment value, model or address: one line on standard error says which |
| 70 | the engine died, or an actor group crashed more often than `--restart-max` allows |
"""


def code_list(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def default_text(setting: Setting) -> str:
    match setting.default:
        case None:
            return "auto" if "auto" in setting.metavar else "unset"
        case bool() as flag:
            return "on" if flag else "off"
        case float() as value:
            return f"{value:g}"
        case value:
            return str(value)


def render() -> str:
    parts = [INTRO]
    group = None
    for setting in SETTINGS:
        if setting.group != group:
            group = setting.group
            parts.append(f"\n## {group}\n")
            parts.append("| Flags | Environment | Default | Meaning |\n|---|---|---|---|")
        value = "" if setting.const is not None else f" `{setting.metavar}`".replace("|", "\\|")
        parts.append(
            f"| {code_list(setting.flags)}{value} | {code_list(setting.env) or '-'} "
            f"| {default_text(setting)} | {setting.help} |"
        )
    return "\n".join(parts) + "\n" + NOTES


def main() -> None:
    page = render()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text() != page:
            raise SystemExit("docs/settings.md is out of date: run python tools/settings_doc.py")
        return
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
