"""Command line of the load generator."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from tools.loadgen.target import UsageError

MAX_REQUESTS = 1_000_000
MAX_CONCURRENCY = 4096

SCENARIO_HELP = """\
scenarios:
  uniform        --concurrency streams at a time, --requests in all, same length each
  mixed          like uniform, with eight different samplers, seeds and penalties side by side
  long-prompt    --concurrency streams decode while a prompt of --long-prompt-tokens arrives;
                 the longest stall of each stream in ms and in median inter-token times
  shared-prefix  all prompts share their first --prompt-tokens words, then differ
  cancel         clients leave at random moments: before the first byte, mid-stream (FIN, reset,
                 half-close), without streaming; afterwards the server must be idle
  overload       --requests at once; counts 200, 503 and Retry-After
  newcomer       idle time to first token, then 8 long streams are dropped and a newcomer is timed
  soak           --requests short ones with random cancellations; memory, file descriptors and
                 threads of --pid must stay flat

exit code: 0 all well, 1 a request failed or a check of the scenario did not hold,
2 wrong arguments or no server.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for; None means that the scenario's own default holds."""

    scenario: str
    base_url: str = "http://127.0.0.1:8080"
    model: str | None = None
    api_key: str | None = None
    allow_remote: bool = False
    concurrency: int = 8
    requests: int | None = None
    max_tokens: int | None = None
    prompt: str | None = None
    prompt_tokens: int = 32
    same_prompt: bool = False
    long_prompt_tokens: int = 1200
    ignore_eos: bool = False
    temperature: float = 0.0
    stream: bool = True
    seed: int = 0
    cancel_share: float | None = None
    repeats: int = 5
    idle_within_s: float = 10.0
    pid: int | None = None
    timeout_s: float = 120.0
    max_time_s: float = 1800.0
    keep_alive: bool = True
    preconnect: bool = False
    json_out: Path | None = None
    plot_out: Path | None = None
    progress: bool = True


def parse_options(argv: list[str], scenarios: tuple[str, ...]) -> Options:
    """Raises UsageError; ``--help`` exits."""
    parser = Parser(
        prog="python tools/load.py",
        description="Put load on an OpenAI-compatible server and measure what its clients see.",
        epilog=SCENARIO_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "scenario", choices=scenarios, metavar="SCENARIO", nargs="?", default="uniform"
    )
    parser.add_argument(
        "--scenario", dest="scenario_flag", choices=scenarios, metavar="SCENARIO", help="the same"
    )
    _target_arguments(parser)
    _load_arguments(parser)
    _scenario_arguments(parser)
    _output_arguments(parser)
    values = vars(parser.parse_args(argv))
    flag = values.pop("scenario_flag")
    if flag is not None:
        values["scenario"] = flag
    return Options(**values)


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of ending the process."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message} (see --help)")


def _target_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", default=Options.base_url, metavar="URL", help="%(default)s")
    group.add_argument("--model", metavar="ID", help="default: the first of /v1/models")
    group.add_argument("--api-key", metavar="KEY")
    group.add_argument("--allow-remote", action="store_true", help="allow hosts beside this one")
    group.add_argument(
        "--no-keepalive", dest="keep_alive", action="store_false", help="a connection per request"
    )
    group.add_argument(
        "--preconnect",
        action="store_true",
        help="open the connections of --concurrency one by one before the load begins",
    )
    group.add_argument(
        "--timeout",
        dest="timeout_s",
        type=_number(0.001, 86400),
        default=Options.timeout_s,
        metavar="S",
        help="seconds for one request (%(default)g)",
    )
    group.add_argument(
        "--max-time",
        dest="max_time_s",
        type=_number(0.001, 86400),
        default=Options.max_time_s,
        metavar="S",
        help="seconds for the whole run (%(default)g)",
    )


def _load_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    count, tokens = _integer(1, MAX_REQUESTS), _integer(1, 1_000_000)
    group.add_argument(
        "--concurrency",
        type=_integer(1, MAX_CONCURRENCY),
        default=Options.concurrency,
        metavar="N",
        help="streams at a time (%(default)s)",
    )
    group.add_argument("--requests", type=count, metavar="M", help="default: by scenario")
    group.add_argument("--max-tokens", type=tokens, metavar="T", help="default: by scenario")
    group.add_argument("--prompt", metavar="TEXT", help="send this text instead of made-up words")
    group.add_argument(
        "--prompt-tokens",
        type=tokens,
        default=Options.prompt_tokens,
        metavar="T",
        help="words in a made-up prompt, about a token each (%(default)s)",
    )
    group.add_argument("--same-prompt", action="store_true", help="do not make prompts differ")
    group.add_argument("--ignore-eos", action="store_true", help="send ignore_eos: true")
    group.add_argument(
        "--temperature",
        type=_number(0, 100),
        default=Options.temperature,
        metavar="X",
        help="%(default)g",
    )
    group.add_argument("--no-stream", dest="stream", action="store_false", help="plain responses")
    group.add_argument(
        "--seed", type=_integer(0, 2**63), default=0, metavar="N", help="of all random choices (0)"
    )


def _scenario_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("single scenarios")
    group.add_argument(
        "--long-prompt-tokens",
        type=_integer(1, 1_000_000),
        default=Options.long_prompt_tokens,
        metavar="P",
        help="long-prompt: words in the arriving prompt (%(default)s)",
    )
    group.add_argument(
        "--cancel-share",
        type=_number(0, 1),
        metavar="X",
        help="cancel, soak: share of clients that leave (0.7, 0.3)",
    )
    group.add_argument(
        "--repeats",
        type=_integer(1, 1000),
        default=Options.repeats,
        metavar="K",
        help="newcomer: idle measurements and rounds (%(default)s)",
    )
    group.add_argument(
        "--idle-within",
        dest="idle_within_s",
        type=_number(0.01, 3600),
        default=Options.idle_within_s,
        metavar="S",
        help="cancel, newcomer, soak: the server must be idle after (%(default)g)",
    )
    group.add_argument("--pid", type=_integer(1, 2**31), metavar="PID", help="soak: the server")


def _output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", dest="json_out", type=Path, metavar="FILE", help="figures as JSON")
    group.add_argument("--plot", dest="plot_out", type=Path, metavar="FILE.png", help="a picture")
    group.add_argument("--no-progress", dest="progress", action="store_false")


class _integer:
    """Argparse type with bounds; the class name appears in no message."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not self.low <= value <= self.high:
            raise argparse.ArgumentTypeError(f"must be within {self.low}..{self.high}")
        return value


class _number:
    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __call__(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not self.low <= value <= self.high:
            raise argparse.ArgumentTypeError(f"must be within {self.low:g}..{self.high:g}")
        return value
