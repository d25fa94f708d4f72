"""Every command line flag and environment variable, in one table.

The parser, the environment reader, ``--help`` and the test of ``docs/settings.md`` are all made
from ``SETTINGS``; nothing else in the program reads ``os.environ`` for configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Parse = Callable[[str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """``dest`` is the field of ServerConfig; ``parse`` raises ValueError with a short reason.

    ``const`` makes the flags switches that store it; ``env`` variables are still parsed.
    """

    dest: str
    flags: tuple[str, ...]
    group: str
    help: str
    default: Any
    parse: Parse
    metavar: str = "VALUE"
    env: tuple[str, ...] = ()
    const: Any = None


def boolean(text: str) -> bool:
    match text.strip().lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off":
            return False
    raise ValueError("expected true or false")


def integer(minimum: int, maximum: int = 2**63 - 1) -> Parse:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("expected a whole number") from None
        if not minimum <= value <= maximum:
            bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            raise ValueError(f"must be {bound}")
        return value

    return parse


def number(minimum: float, maximum: float = math.inf) -> Parse:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("expected a number") from None
        if not math.isfinite(value):
            raise ValueError("must be finite")
        if not minimum <= value <= maximum:
            bound = f"at least {minimum:g}" if value < minimum else f"at most {maximum:g}"
            raise ValueError(f"must be {bound}")
        return value

    return parse


def seconds_or_off(text: str) -> float | None:
    """-1 switches the thing off."""
    value = number(-1.0)(text)
    if value == -1.0:
        return None
    if value <= 0:
        raise ValueError("must be positive, or -1 for off")
    return float(value)


def choice(*names: str) -> Parse:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError("expected one of " + ", ".join(names))
        return text

    return parse


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def size_bytes(value: str) -> int:
    """Bytes, or a number with K, M or G (also KB, MB, GB), times 1024."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    stripped = value.strip().upper().removesuffix("B")
    unit = stripped[-1:] if stripped[-1:] in ("K", "M", "G") else ""
    try:
        count = float(stripped.removesuffix(unit))
    except ValueError:
        raise ValueError("expected a size such as 512M or 8G") from None
    result = count * units[unit]
    if not math.isfinite(result) or result < 1:
        raise ValueError("must be a positive size")
    return int(result)


def auto_or(parse: Parse) -> Parse:
    """``auto`` becomes None."""

    def parse_auto(value: str) -> Any:
        return None if value == "auto" else parse(value)

    return parse_auto


def kv_budget(value: str) -> int | str:
    if value in ("auto", "none"):
        return value
    return size_bytes(value)


def sampling_seed(value: str) -> int | None:
    """-1 means random."""
    parsed: int = integer(-1, 2**64 - 1)(value)
    return None if parsed == -1 else parsed


def alias_list(value: str) -> str:
    """The first name of the sorted comma list is served."""
    names = sorted(name.strip() for name in value.split(",") if name.strip())
    if not names:
        raise ValueError("must name at least one alias")
    return names[0]


MODEL, HTTP, BATCH, SAMPLING, LIFE = (
    "Model",
    "HTTP",
    "Context and batching",
    "Sampling defaults",
    "Supervision and logs",
)

SETTINGS: tuple[Setting, ...] = (
    # Model ------------------------------------------------------------------------------------
    Setting(
        dest="model",
        flags=("-m", "--model"),
        group=MODEL,
        metavar="PATH|OWNER/NAME",
        help="a .gguf file, a folder in MLX or Hugging Face layout, or a name on the Hugging Face "
        "hub; without it the embedded SmolLM2-135M-Instruct is served",
        default=None,
        parse=text,
        env=("LLAMA_ARG_MODEL",),
    ),
    Setting(
        dest="alias",
        flags=("-a", "--alias"),
        group=MODEL,
        metavar="NAME[,NAME]",
        help="the model id to show; of several the first in sorted order",
        default=None,
        parse=alias_list,
        env=("LLAMA_ARG_ALIAS",),
    ),
    Setting(
        dest="revision",
        flags=("--revision",),
        group=MODEL,
        metavar="REV",
        help="branch, tag or commit of a model on the hub",
        default=None,
        parse=text,
    ),
    Setting(
        dest="hf_token",
        flags=("--hf-token",),
        group=MODEL,
        metavar="TOKEN",
        help="access token for the hub; never logged",
        default=None,
        parse=text,
        env=("HF_TOKEN",),
    ),
    Setting(
        dest="offline",
        flags=("--offline",),
        group=MODEL,
        help="never use the network: only models already in the local cache",
        default=False,
        parse=boolean,
        const=True,
        env=("LLAMA_ARG_OFFLINE",),
    ),
    Setting(
        dest="cache_dir",
        flags=("--model-store-root",),
        group=MODEL,
        metavar="DIR",
        help="where downloaded models are kept; "
        "default ${MLXCEL_CACHE_DIR:-~/.cache/mlxcel}/models",
        default=None,
        parse=text,
        env=("MLXCEL_MODELS_DIR",),
    ),
    Setting(
        dest="cpu_dtype",
        flags=("--cpu-dtype",),
        group=MODEL,
        metavar="auto|float32|keep",
        help="weights on the CPU backend: float32 when memory allows (auto), always, or as stored",
        default="auto",
        parse=choice("auto", "float32", "keep"),
        env=("MLXCEL_CPU_DTYPE",),
    ),
    Setting(
        dest="threads",
        flags=("-t", "--threads"),
        group=MODEL,
        metavar="N|auto",
        help="BLAS threads on the CPU backend; auto leaves one core to the HTTP side and picks by "
        "a short measurement",
        default=None,
        parse=auto_or(integer(1, 1024)),
        env=("LLAMA_ARG_THREADS",),
    ),
    # HTTP -------------------------------------------------------------------------------------
    Setting(
        dest="host",
        flags=("--host",),
        group=HTTP,
        metavar="ADDRESS",
        help="address to listen on",
        default="127.0.0.1",
        parse=text,
        env=("LLAMA_ARG_HOST",),
    ),
    Setting(
        dest="port",
        flags=("--port",),
        group=HTTP,
        metavar="N",
        help="port to listen on; 0 takes a free one and logs it",
        default=8080,
        parse=integer(0, 65535),
        env=("LLAMA_ARG_PORT",),
    ),
    Setting(
        dest="timeout_s",
        flags=("--timeout",),
        group=HTTP,
        metavar="SECONDS",
        help="deadline of a request from its arrival to its last byte",
        default=3600.0,
        parse=number(0.001),
        env=("LLAMA_ARG_TIMEOUT",),
    ),
    Setting(
        dest="sse_ping_interval_s",
        flags=("--sse-ping-interval",),
        group=HTTP,
        metavar="SECONDS",
        help="a comment line goes out after so long without an event; -1 switches it off",
        default=10.0,
        parse=seconds_or_off,
        env=("LLAMA_ARG_SSE_PING_INTERVAL",),
    ),
    Setting(
        dest="max_body_bytes",
        flags=("--max-body-size",),
        group=HTTP,
        metavar="SIZE",
        help="largest request body; beyond it 413",
        default=32 * 2**20,
        parse=size_bytes,
        env=("MLXCEL_MAX_BODY_SIZE",),
    ),
    Setting(
        dest="body_timeout_s",
        flags=("--body-timeout",),
        group=HTTP,
        metavar="SECONDS",
        help="how long a request body may take to arrive; beyond it 408",
        default=60.0,
        parse=number(0.001),
        env=("MLXCEL_BODY_TIMEOUT",),
    ),
    Setting(
        dest="stall_s",
        flags=("--stall-timeout",),
        group=HTTP,
        metavar="SECONDS",
        help="a client that reads nothing for so long is ended",
        default=30.0,
        parse=number(0.001),
        env=("MLXCEL_STALL_TIMEOUT",),
    ),
    Setting(
        dest="slots_endpoint",
        flags=("--slots",),
        group=HTTP,
        help="offer GET /slots (on by default)",
        default=True,
        parse=boolean,
        const=True,
        env=("LLAMA_ARG_ENDPOINT_SLOTS",),
    ),
    Setting(
        dest="slots_endpoint",
        flags=("--no-slots",),
        group=HTTP,
        help="do not offer GET /slots",
        default=True,
        parse=boolean,
        const=False,
    ),
    # Context and batching ---------------------------------------------------------------------
    Setting(
        dest="ctx_size",
        flags=("-c", "--ctx-size"),
        group=BATCH,
        metavar="TOKENS",
        help="context in tokens, shared evenly by the slots; 0 gives every slot the model's own",
        default=0,
        parse=integer(0, 2**31),
        env=("LLAMA_ARG_CTX_SIZE",),
    ),
    Setting(
        dest="n_predict",
        flags=("-n", "--predict", "--n-predict"),
        group=BATCH,
        metavar="TOKENS",
        help="max_tokens of a request that names none; -1 means until the end token or a full "
        "context",
        default=-1,
        parse=integer(-1, 2**31),
        env=("LLAMA_ARG_N_PREDICT",),
    ),
    Setting(
        dest="parallel",
        flags=("--parallel", "--n-parallel", "-np"),
        group=BATCH,
        metavar="N",
        help="slots: sequences that prefill or decode at once; -1 means 4",
        default=4,
        parse=integer(-1, 4096),
        env=("LLAMA_ARG_N_PARALLEL",),
    ),
    Setting(
        dest="max_queue_depth",
        flags=("--max-queue-depth",),
        group=BATCH,
        metavar="N",
        help="requests that may wait beyond the slots; further ones get 503 at once",
        default=32,
        parse=integer(0, 100_000),
        env=("MLXCEL_MAX_QUEUE_DEPTH",),
    ),
    Setting(
        dest="priority_max_skips",
        flags=("--priority-max-skips",),
        group=BATCH,
        metavar="N",
        help="starts that may pass a waiting lane before it goes next; 0 makes the lanes strict",
        default=32,
        parse=integer(0, 1_000_000),
        env=("MLXCEL_PRIORITY_MAX_SKIPS",),
    ),
    Setting(
        dest="prefill_chunk",
        flags=("--prefill-chunk-size", "-b", "--batch-size"),
        group=BATCH,
        metavar="TOKENS|auto",
        help="prompt tokens per step; auto makes a chunk take about as long as three decode steps",
        default=None,
        parse=auto_or(integer(1, 2**20)),
        env=("MLXCEL_PREFILL_CHUNK", "LLAMA_ARG_BATCH"),
    ),
    Setting(
        dest="kv_budget",
        flags=("--kv-cache-budget",),
        group=BATCH,
        metavar="auto|SIZE|none",
        help="memory for all KV caches together; auto asks the machine, none sets no bound",
        default="auto",
        parse=kv_budget,
        env=("MLXCEL_KV_CACHE_BUDGET",),
    ),
    Setting(
        dest="token_buffer",
        flags=("--token-buffer",),
        group=BATCH,
        metavar="TOKENS",
        help="undelivered tokens of one request before its sequence is parked",
        default=64,
        parse=integer(4, 65536),
        env=("MLXCEL_TOKEN_BUFFER",),
    ),
    # Sampling defaults ------------------------------------------------------------------------
    Setting(
        dest="temperature",
        flags=("--temp", "--temperature"),
        group=SAMPLING,
        metavar="T",
        help="0 is greedy",
        default=0.8,
        parse=number(0.0),
        env=("LLAMA_ARG_TEMP",),
    ),
    Setting(
        dest="top_k",
        flags=("--top-k",),
        group=SAMPLING,
        metavar="K",
        help="keep the K likeliest tokens; 0 is off",
        default=40,
        parse=integer(0, 2**31 - 1),
        env=("LLAMA_ARG_TOP_K",),
    ),
    Setting(
        dest="top_p",
        flags=("--top-p",),
        group=SAMPLING,
        metavar="P",
        help="keep the likeliest tokens with this mass; 1 is off",
        default=0.95,
        parse=number(0.0, 1.0),
        env=("LLAMA_ARG_TOP_P",),
    ),
    Setting(
        dest="min_p",
        flags=("--min-p",),
        group=SAMPLING,
        metavar="P",
        help="keep tokens with at least this share of the likeliest one; 0 is off",
        default=0.05,
        parse=number(0.0, 1.0),
        env=("LLAMA_ARG_MIN_P",),
    ),
    Setting(
        dest="seed",
        flags=("-s", "--seed"),
        group=SAMPLING,
        metavar="N",
        help="seed of requests that name none; -1 is random",
        default=None,
        parse=sampling_seed,
        env=("LLAMA_ARG_SEED",),
    ),
    # Supervision and logs ---------------------------------------------------------------------
    Setting(
        dest="decode_timeout_s",
        flags=("--decode-timeout",),
        group=LIFE,
        metavar="SECONDS",
        help="an engine step that takes longer means a dead engine: the process ends with 70",
        default=600.0,
        parse=number(0.001),
        env=("MLXCEL_DECODE_TIMEOUT",),
    ),
    Setting(
        dest="drain_s",
        flags=("--drain-timeout",),
        group=LIFE,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM",
        default=30.0,
        parse=number(0.0),
        env=("MLXCEL_DRAIN_TIMEOUT",),
    ),
    Setting(
        dest="restart_max",
        flags=("--restart-max",),
        group=LIFE,
        metavar="N",
        help="restarts of an actor group within 60 s before the process ends with 70",
        default=3,
        parse=integer(0, 1000),
        env=("MLXCEL_RESTART_MAX",),
    ),
    Setting(
        dest="log_level",
        flags=("--log-level",),
        group=LIFE,
        metavar="debug|info|warning|error",
        help="least severe log lines to print",
        default="info",
        parse=choice("debug", "info", "warning", "error"),
        env=("MLXCEL_LOG_LEVEL",),
    ),
    Setting(
        dest="log_format",
        flags=("--log-format",),
        group=LIFE,
        metavar="auto|text|json",
        help="auto prints text on a terminal and to files alike; json prints one object per line",
        default="auto",
        parse=choice("auto", "text", "json"),
        env=("MLXCEL_LOG_FORMAT",),
    ),
    Setting(
        dest="loop_monitor",
        flags=("--loop-monitor",),
        group=LIFE,
        help="measure how late the event loop wakes up and show it in GET /props",
        default=False,
        parse=boolean,
        const=True,
        env=("MLXCEL_LOOP_MONITOR",),
    ),
)
