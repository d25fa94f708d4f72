"""The frozen configuration: defaults, then the environment, then the command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict

from actors.limits import Limits
from models.engine import EngineInfo
from runtime.setting_types import Setting
from runtime.settings_table import SETTINGS

PROG = "mlxcel-server"
MIN_SLOT_CONTEXT = 512
DEFAULT_LIMITS = Limits()


class ConfigError(Exception):
    """One line for the user; the process ends with exit code 2."""


class ServerConfig(BaseModel):
    """Every setting after parsing.  Field meanings: ``runtime.settings_table``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None
    alias: str | None
    revision: str | None
    hf_token: str | None
    offline: bool
    cache_dir: str | None
    cpu_dtype: Literal["auto", "float32", "keep"]
    threads: int | None
    host: str
    port: int
    timeout_s: float
    sse_ping_interval_s: float | None
    max_body_bytes: int
    body_timeout_s: float
    stall_s: float
    slots_endpoint: bool
    ctx_size: int
    n_predict: int
    parallel: int
    max_queue_depth: int
    priority_max_skips: int
    prefill_chunk: int | None
    kv_budget: int | Literal["auto", "none"]
    token_buffer: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    decode_timeout_s: float
    drain_s: float
    restart_max: int
    log_level: Literal["debug", "info", "warning", "error"]
    log_format: Literal["auto", "text", "json"]
    loop_monitor: bool

    @property
    def slots(self) -> int:
        return 4 if self.parallel == -1 else self.parallel

    def boot_limits(self) -> Limits:
        """Limits before the model is known; ``loaded_limits`` narrows them."""
        chunk_max = max(self.prefill_chunk or 0, DEFAULT_LIMITS.prefill_chunk_max_tokens)
        return Limits(
            max_slots=self.slots,
            max_queue_depth=self.max_queue_depth,
            token_buffer=self.token_buffer,
            priority_max_skips=self.priority_max_skips,
            prefill_chunk_tokens=self.prefill_chunk,
            prefill_chunk_max_tokens=chunk_max,
            step_tokens=max(2048, self.slots + chunk_max),
            stall_s=self.stall_s,
            step_timeout_s=self.decode_timeout_s,
            request_timeout_s=self.timeout_s,
            drain_s=self.drain_s,
            restart_max=self.restart_max,
        )

    def loaded_limits(self, info: EngineInfo) -> Limits:
        """Limits for a loaded model.  Raises ConfigError when the model cannot be served so."""
        boot = self.boot_limits()
        slots = boot.max_slots if info.max_batch is None else min(boot.max_slots, info.max_batch)
        slot_context = info.context_length
        if self.ctx_size:
            slot_context = min(self.ctx_size // slots, info.context_length)
            if slot_context < min(MIN_SLOT_CONTEXT, info.context_length):
                raise ConfigError(
                    f"--ctx-size {self.ctx_size} over {slots} slots leaves {slot_context} tokens "
                    f"per slot; at least {MIN_SLOT_CONTEXT} are needed"
                )
        wanted = slots * slot_context
        budget_bytes = info.kv_budget_bytes if self.kv_budget == "auto" else None
        if isinstance(self.kv_budget, int):
            budget_bytes = self.kv_budget
        if budget_bytes is not None and info.kv_bytes_per_token > 0:
            wanted = min(wanted, budget_bytes // info.kv_bytes_per_token)
        if wanted < 1:
            raise ConfigError("--kv-cache-budget does not hold a single token of this model")
        return dataclasses.replace(
            boot, max_slots=slots, slot_context_tokens=slot_context, cache_budget_tokens=wanted
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG,
        description="Serve an MLX model over the OpenAI-compatible HTTP API.",
        epilog="Each flag's environment variable is named in docs/settings.md; flags win.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    groups: dict[str, Any] = {}
    for setting in SETTINGS:
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        group = groups[setting.group]
        help_text = _help(setting).replace("%", "%%")
        if setting.const is not None:
            group.add_argument(
                *setting.flags,
                dest=setting.dest,
                action="store_const",
                const=setting.const,
                help=help_text,
            )
        else:
            group.add_argument(
                *setting.flags,
                dest=setting.dest,
                metavar=setting.metavar,
                type=_typed(setting),
                help=help_text,
            )
    return parser


def _help(setting: Setting) -> str:
    notes = []
    if setting.const is None and setting.default is not None:
        notes.append(f"default {setting.default}")
    if setting.env:
        notes.append("env " + ", ".join(setting.env))
    return setting.help + (f" ({'; '.join(notes)})" if notes else "")


def _typed(setting: Setting) -> Any:
    def convert(value: str) -> Any:
        try:
            return setting.parse(value)
        except ValueError as reason:
            raise argparse.ArgumentTypeError(f"{value!r}: {reason}") from None

    return convert


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> ServerConfig:
    """Raises ConfigError; ``--help`` and ``--version`` raise SystemExit(0) after printing."""
    values: dict[str, Any] = {setting.dest: setting.default for setting in SETTINGS}
    values.update(_from_environment(environ))
    parsed = vars(build_parser().parse_args(list(argv)))
    if parsed.pop("version", False):
        from importlib.metadata import version

        print(f"{PROG} {version(PROG)}")  # noqa: T201
        raise SystemExit(0)
    values.update(parsed)
    if values["parallel"] == 0:
        raise ConfigError("argument --parallel: must be positive, or -1 for the default")
    if values["cache_dir"] is None:
        root = environ.get("MLXCEL_CACHE_DIR", "~/.cache/mlxcel")
        values["cache_dir"] = f"{root}/models"
    return ServerConfig(**values)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """An empty variable counts as unset, as shells and compose files leave such behind."""
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        for name in reversed(setting.env):  # the first name of the tuple wins
            raw = environ.get(name, "")
            if raw == "":
                continue
            try:
                values[setting.dest] = setting.parse(raw)
            except ValueError as reason:
                shown = "its value" if "TOKEN" in name and "HF" in name else repr(raw)
                raise ConfigError(f"environment variable {name}: {shown}: {reason}") from None
    return values
