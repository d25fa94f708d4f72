"""The frozen configuration: defaults, then the environment, then the command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict

from actors.limits import Limits, PromptCacheLimits
from models.engine import EngineInfo
from models.mlx.load import EngineOptions
from runtime.setting_types import Setting
from runtime.settings_table import SETTINGS

PROG = "mlxcel-server"
MIN_SLOT_CONTEXT = 512
DEFAULT_LIMITS = Limits()
UNBOUNDED = 2**62
DETERMINISTIC_CHUNK = 128
QUANTISED = {"q8_0": 8, "q4_0": 4}


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
    max_batch: int | None
    no_batch: bool
    cont_batching: bool
    prefill_grant_interval: int
    max_batch_prefill: int
    max_batch_prefill_tokens: int
    enable_preemption: bool
    preemption_policy: Literal["longest-first", "lowest-priority"]
    max_kv_size: int
    kv_bits: int
    kv_group_size: int
    cache_type_k: str
    cache_type_v: str
    request_memory: int | None
    deterministic: bool
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    ignore_eos: bool
    reasoning_budget: int
    loop_detection: tuple[int, int, int] | None
    prompt_cache_enabled: bool
    no_prompt_cache: bool
    cache_prompt: bool
    prompt_cache_bytes: int
    cache_ram: int | None
    prompt_cache_entries: int
    prompt_cache_ttl_s: float
    prompt_cache_min_prefix: int
    snapshot_bytes: int
    snapshot_entries: int
    snapshot_ttl_s: float
    apc_enabled: bool
    apc_block_size: int
    apc_hash: Literal["sha256", "blake3"]
    cache_reuse: int
    decode_timeout_s: float
    drain_s: float
    restart_max: int
    log_level: Literal["debug", "info", "warning", "error"]
    log_format: Literal["auto", "text", "json"]
    loop_monitor: bool

    @property
    def slots(self) -> int:
        if self.no_batch:
            return 1
        return 4 if self.parallel == -1 else self.parallel

    @property
    def rows(self) -> int | None:
        """Rows of one decode step (None: every slot)."""
        return self.max_batch if self.cont_batching else 1

    @property
    def engine_options(self) -> EngineOptions:
        return EngineOptions(
            max_kv_size=self.max_kv_size or None,
            kv_bits=self.kv_bits or QUANTISED.get(self.cache_type_k),
            kv_group_size=self.kv_group_size,
            deterministic=self.deterministic,
        )

    @property
    def prompt_cache(self) -> PromptCacheLimits:
        off = self.no_prompt_cache or self.cache_ram == 0 or self.deterministic
        capacity = self.prompt_cache_bytes
        if self.cache_ram is not None:
            capacity = UNBOUNDED if self.cache_ram == -1 else self.cache_ram
        return PromptCacheLimits(
            enabled=self.prompt_cache_enabled and self.cache_prompt and not off,
            capacity_bytes=capacity,
            max_entries=self.prompt_cache_entries,
            ttl_s=self.prompt_cache_ttl_s,
            min_prefix=self.prompt_cache_min_prefix,
            apc=self.apc_enabled,
            block_tokens=self.apc_block_size,
            hash_name=self.apc_hash,
            snapshot_capacity_bytes=self.snapshot_bytes,
            snapshot_max_entries=self.snapshot_entries,
            snapshot_ttl_s=self.snapshot_ttl_s,
        )

    def boot_limits(self) -> Limits:
        """Limits before the model is known; ``loaded_limits`` narrows them."""
        chunk = self.prefill_chunk
        if self.deterministic and chunk is None:
            chunk = DETERMINISTIC_CHUNK
        chunk_max = max(chunk or 0, DEFAULT_LIMITS.prefill_chunk_max_tokens)
        return Limits(
            max_slots=self.slots,
            max_queue_depth=self.max_queue_depth,
            token_buffer=self.token_buffer,
            priority_max_skips=self.priority_max_skips,
            prefill_chunk_tokens=chunk,
            prefill_grant_interval=self.prefill_grant_interval,
            max_batch_prefill=1 if self.deterministic else self.max_batch_prefill,
            max_batch_prefill_tokens=self.max_batch_prefill_tokens or UNBOUNDED,
            max_batch=self.rows,
            enable_preemption=self.enable_preemption,
            preemption_policy=self.preemption_policy,
            request_memory_bytes=self.request_memory,
            prompt_cache=self.prompt_cache,
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
        budget = self._budget_tokens(info, boot.prompt_cache, slots * slot_context)
        if budget < min(MIN_SLOT_CONTEXT, slot_context):
            raise ConfigError(
                f"the KV cache budget holds {budget} tokens of this model; at least "
                f"{min(MIN_SLOT_CONTEXT, slot_context)} are needed"
            )
        return dataclasses.replace(
            boot,
            max_slots=slots,
            max_batch=None if boot.max_batch is None else min(boot.max_batch, slots),
            # No request can be longer than what all the cache holds.
            slot_context_tokens=min(slot_context, budget),
            cache_budget_tokens=budget,
            kv_bytes_per_token=info.kv_bytes_per_token,
        )

    def _budget_tokens(self, info: EngineInfo, cache: PromptCacheLimits, leased: int) -> int:
        """Tokens for full slots and, beside them, for kept prefixes, as far as memory allows."""
        size = info.kv_bytes_per_token
        if size <= 0:
            return leased
        wanted = leased
        if cache.enabled and info.prefix != "none":
            capacity = cache.capacity_bytes
            if info.prefix == "snapshots":
                capacity = cache.snapshot_capacity_bytes
            wanted += capacity // size
        budget_bytes = info.kv_budget_bytes if self.kv_budget == "auto" else None
        if isinstance(self.kv_budget, int):
            budget_bytes = self.kv_budget
        return wanted if budget_bytes is None else min(wanted, budget_bytes // size)


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
        if not setting.flags:
            continue  # an environment variable only
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
    _check_together(values)
    if values["cache_dir"] is None:
        root = environ.get("MLXCEL_CACHE_DIR", "~/.cache/mlxcel")
        values["cache_dir"] = f"{root}/models"
    return ServerConfig(**values)


def _check_together(values: Mapping[str, Any]) -> None:
    """What a setting alone cannot tell.  Raises ConfigError."""
    if values["parallel"] == 0:
        raise ConfigError(
            "--parallel (LLAMA_ARG_N_PARALLEL) must be positive, or -1 for the default"
        )
    if values["cache_reuse"] > 0:
        raise ConfigError(
            "--cache-reuse is not supported: caches are reused from the beginning of a prompt only"
        )
    if QUANTISED.get(values["cache_type_k"]) != QUANTISED.get(values["cache_type_v"]):
        raise ConfigError("--cache-type-k and --cache-type-v must be quantised alike")
    if values["kv_bits"] not in (0, 4, 8):
        raise ConfigError("--kv-bits must be 4 or 8 (or 0 for no quantisation)")
    if values["kv_group_size"] not in (32, 64, 128):
        raise ConfigError("--kv-group-size must be 32, 64 or 128")
    if values["kv_bits"] and values["max_kv_size"]:
        raise ConfigError("--kv-bits and --max-kv-size cannot be used together")


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
