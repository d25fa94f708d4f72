"""Tables, JSON and pictures of a finished run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from tools.loadgen.bench import Progress
from tools.loadgen.outcome import Outcome

SCHEMA = "mlxcel-load/1"
# Below this the fixed cost of a run hides what a token costs the client.
MANY_TOKENS = 500
_COLUMNS = ("mean", "p50", "p90", "p99", "max")


class BarProgress(Progress):
    """A bar with the counts of answers, leavers and failures."""

    def __init__(self, console: Console) -> None:
        self.bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            # Each refresh costs the machine some milliseconds that the server lacks.
            refresh_per_second=2,
            transient=True,
        )
        self._task = self.bar.add_task("", total=None, note="")
        self._tokens = self._failed = self._left = 0

    def start(self, title: str, total: int) -> None:
        self.bar.update(self._task, description=title, total=total)

    def advance(self, outcome: Outcome) -> None:
        self._tokens += outcome.tokens
        self._failed += outcome.error is not None
        self._left += outcome.left
        note = f"{self._tokens} tokens"
        note += f", {self._left} left" if self._left else ""
        note += f", {self._failed} failed" if self._failed else ""
        self.bar.update(self._task, advance=1, note=note)


def show(console: Console, report: Mapping[str, Any], details: Mapping[str, Any]) -> None:
    """Print a report made by ``summarise`` plus the scenario's own details."""
    target = report["target"]
    table = Table(
        title=f"{report['scenario']}: {target['model']} at {target['base_url']}",
        title_justify="left",
    )
    table.add_column("")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    latency, rate = report["latency_ms"], report["throughput"]
    _row(table, "time to first token, ms", latency["ttft"])
    _row(table, "inter-token latency, ms", latency["itl"])
    _row(table, "end to end, ms", latency["e2e"])
    _row(table, "tokens/s of one stream", rate["per_stream_tokens_per_s"])
    console.print(table)
    tokens, requests = report["tokens"], report["requests"]
    steady = rate["steady_tokens_per_s"]
    console.print(
        f"{tokens['total']} tokens (by {tokens['source']}) in {report['wall_s']:.2f} s: "
        f"{rate['tokens_per_s'] or 0:.1f} tokens/s"
        + (f"; {steady:.1f} with {rate['steady_streams']} streams decoding" if steady else ""),
        soft_wrap=True,
    )
    statuses = ", ".join(f"{code}: {n}" for code, n in sorted(requests["by_status"].items()))
    console.print(
        f"{requests['sent']} requests: {requests['ok']} ok, {requests['left']} left, "
        f"{requests['failed']} failed (by status: {statuses or 'none'})",
        soft_wrap=True,
    )
    cost = report["client"]["cpu_us_per_token"]
    if cost is not None and tokens["total"] >= MANY_TOKENS:
        console.print(f"client CPU: {cost:.1f} us per token", style="dim")
    for text, count in requests["errors"].items():
        console.print(f"  {count} x {text}", style="yellow", markup=False, soft_wrap=True)
    for key, value in details.items():
        console.print(f"{key}: {_brief(value)}", markup=False, soft_wrap=True)
    for problem in report["verdict"]["problems"]:
        console.print(f"problem: {problem}", style="red", markup=False, soft_wrap=True)


def _row(table: Table, name: str, values: Mapping[str, float] | None) -> None:
    cells = [f"{values[c]:.2f}" for c in _COLUMNS] if values else ["-"] * len(_COLUMNS)
    table.add_row(name, *cells)


def _brief(value: Any) -> str:
    """A scenario's own figure: one line for a spread, one line per entry for the rest."""
    if isinstance(value, dict) and "p50" not in value:
        return "".join(f"\n  {key}: {_flat(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "".join(f"\n  {_flat(inner)}" for inner in value)
    return _flat(value)


def _flat(value: Any) -> str:
    if isinstance(value, dict) and "p50" in value:
        return f"p50 {value['p50']:.2f} / p90 {value['p90']:.2f} / max {value['max']:.2f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(inner)}" for key, inner in value.items())
    return str(value)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Whole or not at all.  Raises OSError."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=2) + "\n")
    os.replace(part, path)


def write_plot(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """TTFT and inter-token latency as cumulative shares, tokens per second over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    seen = [o for o in outcomes if o.stamps]
    origin = min((o.started for o in outcomes), default=0.0)
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    _shares(axes[0], [1000 * o.ttft for o in seen if o.ttft is not None])
    axes[0].set(title="time to first token", xlabel="ms", ylabel="share of requests")
    _shares(axes[1], [1000 * gap for o in seen for gap in o.gaps])
    axes[1].set(title="inter-token latency", xlabel="ms", ylabel="share of tokens")
    stamps = [stamp - origin for o in seen for stamp in o.stamps]
    if stamps:
        span = max(max(stamps), 1e-3)
        bins = max(1, min(120, int(span / 0.25)))
        axes[2].hist(stamps, bins=bins, range=(0, span), weights=[bins / span] * len(stamps))
    axes[2].set(title="throughput", xlabel="s", ylabel="tokens per second")
    figure.suptitle(title)
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def _shares(axis: Any, values: list[float]) -> None:
    if values:
        ordered = sorted(values)
        axis.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post")
        axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)
