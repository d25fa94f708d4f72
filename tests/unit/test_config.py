from __future__ import annotations

import pytest

from models.engine import EngineInfo
from runtime.config import ConfigError, ServerConfig, load_config
from runtime.settings_table import SETTINGS
from tests.e2e.server import run_to_end
from tools.settings_doc import PAGE, render


def info(**changes: object) -> EngineInfo:
    facts: dict[str, object] = {
        "model_type": "llama",
        "vocab_size": 512,
        "context_length": 8192,
        "kv_bytes_per_token": 1000,
    }
    return EngineInfo(**(facts | changes))  # type: ignore[arg-type]


def config(*argv: str, **environ: str) -> ServerConfig:
    return load_config(list(argv), environ)


def test_defaults_need_nothing() -> None:
    got = config()
    assert (got.model, got.port, got.slots, got.temperature) == (None, 8080, 4, 0.8)
    assert got.cache_dir == "~/.cache/mlxcel/models"


def test_flags_win_over_the_environment() -> None:
    got = config("--port", "1", LLAMA_ARG_PORT="2", LLAMA_ARG_HOST="::1")
    assert (got.port, got.host) == (1, "::1")


def test_the_first_variable_of_a_setting_wins() -> None:
    got = config(LLAMA_ARG_BATCH="7", MLXCEL_PREFILL_CHUNK="9")
    assert got.prefill_chunk == 9


def test_an_empty_variable_counts_as_unset() -> None:
    assert config(LLAMA_ARG_PORT="").port == 8080


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "http"], ["--port", "'http'", "whole number"]),
        (["--port", "65536"], ["--port", "at most 65535"]),
        (["--parallel", "0"], ["--parallel", "positive"]),
        (["--temp", "nan"], ["--temp", "finite"]),
        (["--temp", "-1"], ["--temp", "at least 0"]),
        (["--top-p", "1.5"], ["--top-p", "at most 1"]),
        (["--sse-ping-interval", "0"], ["--sse-ping-interval", "positive"]),
        (["--kv-cache-budget", "2x"], ["--kv-cache-budget", "size"]),
        (["--kv-cache-budget", "0"], ["--kv-cache-budget", "positive"]),
        (["--cpu-dtype", "int8"], ["--cpu-dtype", "float32"]),
        (["--seed", "-2"], ["--seed", "at least -1"]),
        (["--prefill-chunk-size", "0"], ["--prefill-chunk-size", "at least 1"]),
        (["--alias", ","], ["--alias", "at least one"]),
        (["--model", " "], ["--model", "empty"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["--por", "1"], ["--por"]),
        (["stray"], ["stray"]),
    ],
)
def test_a_bad_flag_is_named_in_one_line(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*argv)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.env], ids=lambda s: s.dest)
def test_every_variable_is_read_and_its_bad_value_named(setting: object) -> None:
    strings = {"model", "alias", "revision", "hf_token", "cache_dir", "host"}
    for name in setting.env:  # type: ignore[attr-defined]
        bad = "  " if setting.dest in strings else "no such value"  # type: ignore[attr-defined]
        with pytest.raises(ConfigError) as caught:
            load_config([], {name: bad})
        assert name in str(caught.value)


def test_a_secret_is_not_shown_in_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], {"HF_TOKEN": "   "})
    assert repr("   ") not in str(caught.value)


def test_sizes_and_special_words() -> None:
    assert config("--max-body-size", "1.5K").max_body_bytes == 1536
    assert config("--kv-cache-budget", "2GB").kv_budget == 2 * 2**30
    assert config("--kv-cache-budget", "none").kv_budget == "none"
    assert config("--prefill-chunk-size", "auto").prefill_chunk is None
    assert config("--sse-ping-interval", "-1").sse_ping_interval_s is None
    assert config("--seed", "-1").seed is None
    assert config("--alias", "zeta, alpha").alias == "alpha"
    assert config("--parallel", "-1").slots == 4
    assert config("--no-slots").slots_endpoint is False


def test_limits_split_the_context_over_the_slots() -> None:
    limits = config("--ctx-size", "4096", "--parallel", "4").loaded_limits(info())
    assert (limits.max_slots, limits.slot_context_tokens) == (4, 1024)
    assert limits.cache_budget_tokens == 4096


def test_too_little_context_per_slot_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="--ctx-size 1000"):
        config("--ctx-size", "1000", "--parallel", "4").loaded_limits(info())


def test_a_model_that_cannot_batch_gets_one_slot() -> None:
    limits = config().loaded_limits(info(max_batch=1))
    assert limits.max_slots == 1


def test_the_budget_comes_from_memory_unless_told() -> None:
    facts = info(kv_budget_bytes=5_000_000)
    assert config().loaded_limits(facts).cache_budget_tokens == 5000
    assert config("--kv-cache-budget", "none").loaded_limits(facts).cache_budget_tokens == 32768
    assert config("--kv-cache-budget", "1M").loaded_limits(facts).cache_budget_tokens == 1048
    with pytest.raises(ConfigError):
        config("--kv-cache-budget", "10").loaded_limits(facts)


def test_a_large_fixed_chunk_fits_into_a_step() -> None:
    limits = config("--prefill-chunk-size", "100000").boot_limits()
    assert limits.step_tokens >= 100_000 + limits.max_slots


def test_the_settings_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render()


def test_every_flag_is_in_help() -> None:
    out = run_to_end("--help")
    assert out.returncode == 0
    for setting in SETTINGS:
        for flag in setting.flags:
            assert flag in out.stdout
