from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from actors.errors import ErrorCode, RequestError
from actors.requests import CachePolicy, GenerationRequest, LoopRule, Priority
from httpapi.errors import SHAPES
from httpapi.protocols.openai_chat.request import ChatCall, parse_chat
from httpapi.protocols.shared.call import MAX_COUNT, Call, lane_of
from httpapi.settings import GenerationDefaults
from models.sampling import WHOLE, SamplingParams
from tests.http.fakes import chat

DEFAULTS = GenerationDefaults()
USER = {"role": "user", "content": "Hi"}


def read(**fields: Any) -> ChatCall:
    return parse_chat(chat(**fields), DEFAULTS)


def parse(defaults: GenerationDefaults = DEFAULTS, **fields: Any) -> Call:
    return parse_chat(chat(**fields), defaults).call


def refusal(body: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_chat(body, DEFAULTS)
    return caught.value


# param that the error must name, None: it may name any
REFUSED: Sequence[tuple[dict[str, Any], str]] = [
    # required fields and their types
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [None]}, "messages[0]"),
    # messages
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": None, "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "banana", "content": "Hi"}]}, "messages[1].role"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": {"text": "Hi"}}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{**USER, "name": 5}]}, "messages[0].name"),
    ({"messages": [{**USER, "tool_call_id": []}]}, "messages[0].tool_call_id"),
    ({"messages": [{**USER, "reasoning": 1}]}, "messages[0].reasoning"),
    ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    # no effective input
    ({"messages": [{"role": "user", "content": ""}]}, "messages"),
    ({"messages": [{"role": "user", "content": " \n\t"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages"),
    # stream
    ({"stream": "true"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"include_usage": "true"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": True}, "stream_options"),
    # length
    *[
        ({name: value}, name)
        for name in ("max_tokens", "max_completion_tokens", "n_predict")
        for value in (-2, "20", 1.5, True, [5], {})
    ],
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    # sampling
    *[({"temperature": value}, "temperature") for value in (-0.1, "1", True, math.nan, math.inf)],
    *[({"top_p": value}, "top_p") for value in (-0.1, 2, 1.0001, "0.5", False)],
    *[({"min_p": value}, "min_p") for value in (-0.1, 2, "0.5")],
    *[({"top_k": value}, "top_k") for value in (1.5, "40", True)],
    *[({"seed": value}, "seed") for value in (-2, 1.5, "1", True, 2**64)],
    # stop
    *[({"stop": value}, "stop") for value in (5, True, "", [""], ["a", 5], [["a"]], {"a": 1})],
    ({"stop": [str(number) for number in range(17)]}, "stop"),
    # n
    *[({"n": value}, "n") for value in (0, 129, -1, 10**9, "1", 1.5, True)],
    # logprobs
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 50}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"top_logprobs": 0}, "top_logprobs"),
    ({"top_logprobs": 5, "logprobs": False}, "top_logprobs"),
    ({"xtc_probability": 1.5}, "xtc_probability"),
    ({"xtc_threshold": 0.6}, "xtc_threshold"),
    ({"xtc_threshold": 0.6, "xtc_probability": 2}, "xtc_threshold"),
    ({"top_n_sigma": -1}, "top_n_sigma"),
    ({"typical_p": 0}, "typical_p"),
    ({"typical_p": 1.5}, "typical_p"),
    ({"p_less": 1}, "p_less"),
    ({"frequency_penalty": "0"}, "frequency_penalty"),
    ({"dry_multiplier": -1}, "dry_multiplier"),
    ({"dry_sequence_breakers": ["\n"]}, "dry_sequence_breakers[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {str(one): 1 for one in range(4097)}}, "logit_bias"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repeat_penalty": -1}, "repeat_penalty"),
    ({"repeat_last_n": -2}, "repeat_last_n"),
    ({"dry_base": 0}, "dry_base"),
    ({"dry_sequence_breakers": [1] * 1025}, "dry_sequence_breakers"),
    ({"max_pattern_size": 5000}, "max_pattern_size"),
    ({"max_pattern_size": -1}, "max_pattern_size"),
    ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size"),
    ({"logit_bias": {"1": "5"}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    # tools
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools"),
    ({"tools": [{}] * 129}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": "banana"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    # structured output
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"response_format": {"type": "banana"}}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": "text"}, "response_format"),
    # reasoning
    *[
        ({name: value}, name)
        for name in (
            "thinking_budget_tokens",
            "reasoning_budget_tokens",
            "thinking_token_budget",
            "thinking_budget",
        )
        for value in (-2, "5", 1.5)
    ],
    ({"thinking_budget": 100, "max_tokens": 5}, "thinking_budget"),
    ({"reasoning_control": True}, "reasoning_control"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"extra_body": []}, "extra_body"),
    # prompt cache
    ({"cache_prompt": "no"}, "cache_prompt"),
    ({"user": 5}, "user"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: repr(value)[:60])
def test_refused_with_400_and_the_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat(**fields))
    assert error.code is ErrorCode.INVALID_REQUEST
    assert SHAPES[error.code].status == 400
    assert error.param == param
    assert error.message


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_required_fields(missing: str) -> None:
    body = chat()
    del body[missing]
    error = refusal(body)
    assert error.param == missing
    assert "required" in error.message


INERT: Sequence[dict[str, Any]] = [
    {"tools": []},
    {"tools": None},
    {"tools": [], "tool_choice": "auto"},
    {"tools": [], "tool_choice": "none"},
    {"tools": [{"type": "function"}], "tool_choice": "none"},
    {"parallel_tool_calls": True},
    {"response_format": None},
    {"response_format": {"type": "text"}},
    {"logprobs": False},
    {"logit_bias": {}},
    {"logit_bias": None},
    {"repetition_penalty": 1.0},
    {"repeat_penalty": 1},
    {"repeat_last_n": 64},
    {"frequency_penalty": 0},
    {"presence_penalty": 0.0},
    {"dry_base": 1.75, "dry_allowed_length": 2},
    {"logit_bias": {}, "n_predict": -1},
    {"xtc_probability": 0, "xtc_threshold": 0.1},
    {"typical_p": 1},
    {"top_n_sigma": 0},
    {"p_less": False},
    {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0},
    {"thinking_budget_tokens": -1},
    {"thinking_budget": -1, "max_tokens": 5, "n_predict": 5},
    {"reasoning_control": False},
    {"n": 1},
    {"n": None},
    {"stop": None},
    {"stop": []},
    {"user": "", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    {"cache_prompt": True, "prompt_cache_key": "", "extra_body": {"cache_prompt": "no"}},
    {"something_new": [1, {"a": None}]},
    {"stream_options": None},
    {"model": ""},
]


@pytest.mark.parametrize("fields", INERT, ids=repr)
def test_inert_values_change_nothing(fields: dict[str, Any]) -> None:
    plain = parse(max_tokens=fields.get("max_tokens"))
    assert parse(**fields) == plain


def test_defaults_fill_what_is_left_out() -> None:
    call = parse()
    assert (call.sampling.temperature, call.sampling.top_k) == (0.8, 40)
    assert (call.sampling.top_p, call.sampling.min_p) == (0.95, 0.05)
    assert call.seed is None
    assert call.max_tokens is None
    assert call.stop == ()
    assert not call.stream
    other = parse(GenerationDefaults(temperature=0.1, top_k=3, seed=9, n_predict=100))
    assert (other.sampling.temperature, other.sampling.top_k) == (0.1, 3)
    assert (other.seed, other.max_tokens) == (9, 100)


def test_null_is_the_same_as_absent() -> None:
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "stream")
    assert parse(**dict.fromkeys(names)) == parse()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1e-30}, {"temperature": 0.0}),
        ({"temperature": 3}, {"temperature": 3.0}),
        ({"temperature": 1e300}, {"temperature": 1e6}),
        ({"temperature": 10**60}, {"temperature": 1e6}),
        ({"top_p": 1}, {"top_p": 1.0}),
        ({"top_p": 0}, {"top_k": 1, "top_p": 1.0}),
        ({"top_k": -5}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 10**9}, {"top_k": 10**9}),
        ({"top_k": 10**30}, {"top_k": MAX_COUNT}),
        ({"min_p": 1}, {"min_p": 1.0}),
    ],
)
def test_sampling_values(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    sampling = parse(**fields).sampling
    for name, value in expected.items():
        assert getattr(sampling, name) == value


def test_tiny_temperature_and_top_p_zero_are_greedy() -> None:
    assert parse(temperature=1e-30).sampling.greedy
    assert parse(top_p=0).sampling.greedy
    assert not parse(temperature=0.01, top_k=40).sampling.greedy


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 20}, 20),
        ({"max_tokens": 10**9}, 10**9),
        ({"max_tokens": 10**40}, MAX_COUNT),
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
        ({"max_completion_tokens": 9, "max_tokens": 5, "n_predict": 2}, 9),
        ({"max_completion_tokens": None, "max_tokens": 5, "n_predict": 2}, 5),
        ({"n_predict": 2}, 2),
        ({}, None),
    ],
)
def test_length_aliases(fields: dict[str, Any], expected: int | None) -> None:
    assert parse(**fields).max_tokens == expected


def test_seed_is_used_or_drawn() -> None:
    def seed(call: Call) -> int:
        return call.generation_request(
            read().prompt, request_id="r", seed=77, lane=Priority.NORMAL, deadline_s=1.0
        ).sampling.seed

    assert seed(parse(seed=5)) == 5
    assert seed(parse(seed=2**64 - 1)) == 2**64 - 1
    assert seed(parse(seed=0)) == 0
    assert seed(parse(seed=-1)) == 77
    assert seed(parse()) == 77
    fixed = GenerationDefaults(seed=3)
    assert seed(parse(fixed)) == 3
    assert seed(parse(fixed, seed=-1)) == 77  # asks for a random one


def test_stop_is_a_string_or_an_array() -> None:
    assert parse(stop="three four").stop == ("three four",)
    assert parse(stop=["zzz", "three four"]).stop == ("zzz", "three four")
    assert len(parse(stop=[str(number) for number in range(16)]).stop) == 16


def messages(raw: list[Any]) -> list[dict[str, Any]]:
    return [dict(message) for message in read(messages=raw).prompt.messages]


def test_roles_and_their_order_are_kept() -> None:
    raw = [
        {"role": "developer", "content": "The secret word is PELICAN-31."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "late"},
        {"role": "user", "content": "c"},
    ]
    assert [(m["role"], m["content"]) for m in messages(raw)] == [
        ("system", "The secret word is PELICAN-31."),
        ("user", "a"),
        ("assistant", "b"),
        ("system", "late"),
        ("user", "c"),
    ]


def test_text_parts_are_joined_without_a_separator() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert messages([{"role": "user", "content": parts}])[0]["content"] == "one two"


@pytest.mark.parametrize("extra", [{"content": None}, {}])
def test_tool_turns_reach_the_template(extra: dict[str, Any]) -> None:
    call = {
        "id": "call_x1",
        "type": "function",
        "function": {"name": "plus", "arguments": '{"a":4}'},
    }
    result = messages(
        [
            USER,
            {"role": "assistant", "tool_calls": [call], **extra},
            {"role": "tool", "tool_call_id": "call_x1", "content": "13"},
        ]
    )
    assert result[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert result[2] == {"role": "tool", "content": "13", "tool_call_id": "call_x1"}


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_is_forwarded_and_counts_as_input(key: str) -> None:
    result = messages([{"role": "assistant", "content": None, key: "hm"}])
    assert result[0]["reasoning"] == result[0]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("part", "start"),
    [
        ({"type": "image_url", "image_url": {"url": "http://10.0.0.1/x"}}, "image input"),
        ({"type": "input_audio", "input_audio": {"data": ""}}, "audio input"),
        ({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, "video input"),
    ],
)
def test_media_is_501_before_anything_is_fetched(part: dict[str, Any], start: str) -> None:
    error = refusal(chat(messages=[{"role": "user", "content": [part]}]))
    assert SHAPES[error.code].status == 501
    assert SHAPES[error.code].type == "not_supported_error"
    assert error.message.startswith(f"{start} is not supported")


def test_order_of_checks() -> None:
    """Each field is at fault; taking them away one by one shows the order of the contract."""
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    body = chat(
        messages=[],
        top_logprobs=50,
        xtc_threshold=0.9,
        xtc_probability=2,
        top_n_sigma=-1,
        typical_p=9,
        tool_choice="banana",
        thinking_budget=-5,
        response_format={"type": "json_schema"},
    )
    seen = [refusal(body).param]
    body["messages"] = [{"role": "user", "content": image}]
    for name in ("top_logprobs", "xtc_threshold", "xtc_probability", "top_n_sigma", "typical_p"):
        seen.append(refusal(body).param)
        del body[name]
    seen.append(refusal(body).param)
    body["messages"] = [USER]
    for name in ("tool_choice", "thinking_budget", "response_format"):
        seen.append(refusal(body).param)
        del body[name]
    assert seen == [
        "messages",
        "top_logprobs",
        "xtc_threshold",
        "xtc_probability",
        "top_n_sigma",
        "typical_p",
        "messages[0].content[0]",
        "tool_choice",
        "thinking_budget",
        "response_format",
    ]
    parse_chat(body, DEFAULTS)


def kwargs(defaults: dict[str, Any], **fields: Any) -> dict[str, Any]:
    read = parse_chat(chat(**fields), GenerationDefaults(template_kwargs=defaults))
    return dict(read.prompt.template_kwargs)


def test_template_kwargs_take_one_shape_and_merge_per_key() -> None:
    base = {"a": 1, "b": 2}
    nested = {"chat_template_kwargs": {"b": 5}, "preserve_thinking": True}
    assert kwargs(base) == base
    assert kwargs(base, chat_template_kwargs={"b": 3}, extra_body=nested) == {"a": 1, "b": 3}
    assert kwargs(base, extra_body=nested) == {"a": 1, "b": 5}
    assert kwargs({}, extra_body={"preserve_thinking": True}) == {"preserve_thinking": True}
    assert kwargs({}, preserve_thinking=False) == {"preserve_thinking": False}
    assert kwargs({}, preserve_thinking="yes") == {}
    assert kwargs({}, extra_body={"chat_template_kwargs": 5}) == {}


def test_reasoning_effort() -> None:
    for off in ("none", " OFF ", "disabled", "False", "0"):
        assert kwargs({}, reasoning_effort=off) == {"enable_thinking": False}
    on = {"enable_thinking": True, "reasoning_effort": "high"}
    assert kwargs({"enable_thinking": False}, reasoning_effort="high") == on
    assert kwargs({}, extra_body={"reasoning_effort": "high"}) == on
    assert kwargs({}, extra_body={"reasoning_effort": 5}) == {}
    assert kwargs({}, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == {
        "enable_thinking": True
    }


def test_lanes() -> None:
    assert lane_of("high") is Priority.HIGH
    assert lane_of(" Low ") is Priority.LOW
    for unknown in (None, "", "urgent", "normal"):
        assert lane_of(unknown) is Priority.NORMAL


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("best_of", 3),
        ("mirostat", 2),
        ("modalities", ["text", "audio"]),
        ("grammar", "root ::= [a-z]"),
        ("json_schema", {"type": "object"}),
        ("guided_choice", ["a", "b"]),
        ("echo", True),
        ("stop_token_ids", [1]),
    ],
)
def test_a_field_of_another_server_that_changes_the_answer_is_refused(
    field: str, value: object
) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**{field: value})
    assert caught.value.param == field
    assert caught.value.message == f"{field} is not supported by this server yet"


@pytest.mark.parametrize(
    ("field", "value"),
    [("function_call", "none"), ("mirostat", 0), ("modalities", ["text"]), ("grammar", None)],
)
def test_its_inert_value_passes(field: str, value: object) -> None:
    parse(**{field: value})


def test_ignore_eos_reaches_the_request() -> None:
    call = parse(ignore_eos=True)
    assert request_of(call).ignore_eos
    assert parse(GenerationDefaults(ignore_eos=True)).ignore_eos
    assert not parse(GenerationDefaults(ignore_eos=True), ignore_eos=False).ignore_eos
    assert not parse().ignore_eos
    with pytest.raises(RequestError) as caught:
        parse(ignore_eos="yes")
    assert caught.value.param == "ignore_eos"


def request_of(call: Call) -> GenerationRequest:
    return call.generation_request(
        read().prompt, request_id="r", seed=1, lane=Priority.NORMAL, deadline_s=1.0
    )


def test_the_whole_chain_reaches_the_sampler() -> None:
    call = parse(
        repetition_penalty=1.2,
        repeat_penalty=3.0,
        repetition_context_size=7,
        frequency_penalty=-0.5,
        presence_penalty=9,
        dry_multiplier=0.8,
        dry_base=2,
        dry_allowed_length=3,
        dry_sequence_breakers=[5, 6],
        xtc_probability=0.5,
        xtc_threshold=0.2,
        typical_p=0.9,
        top_n_sigma=1.5,
        p_less=True,
        logit_bias={"7": 500, "3": -100, "99999999": 1},
        seed=4,
        min_tokens=3,
    )
    sampling = request_of(call).sampling
    assert sampling == SamplingParams(
        seed=4,
        logit_bias=((3, -100.0), (7, 500.0), (99999999, 1.0)),
        repetition_penalty=1.2,
        frequency_penalty=-0.5,
        presence_penalty=9.0,
        penalty_window=7,
        dry_multiplier=0.8,
        dry_base=2.0,
        dry_allowed_length=3,
        dry_window=WHOLE,
        dry_breakers=(5, 6),
        top_n_sigma=1.5,
        p_less=True,
        typical_p=0.9,
        xtc_probability=0.5,
        xtc_threshold=0.2,
    )
    assert request_of(call).min_tokens == 3
    assert parse(repeat_penalty=3).sampling.repetition_penalty == 3.0


def test_the_window_of_dry() -> None:
    """In a request 0 is everything; the server's own setting says so with -1."""
    server = GenerationDefaults(dry_multiplier=0.5, dry_window=64)
    assert parse(server).sampling.dry_window == 64
    assert parse(server, dry_penalty_last_n=0).sampling.dry_window == WHOLE
    assert parse(server, dry_penalty_last_n=9).sampling.dry_window == 9
    assert parse(dry_multiplier=0.5).sampling.dry_window == WHOLE


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_logprobs_are_asked_for(fields: dict[str, Any], expected: int | None) -> None:
    assert parse(**fields).sampling.logprobs == expected


def test_loop_detection_of_the_request_wins_as_a_whole() -> None:
    rule = LoopRule(min_size=2, max_size=9, count=5)
    server = GenerationDefaults(loop=rule)
    assert parse().loop is None
    assert parse(server).loop == rule
    assert parse(server, max_pattern_size=0).loop is None
    assert parse(server, min_count=3).loop is None
    assert parse(max_pattern_size=4, min_count=1).loop is None
    own = parse(server, max_pattern_size=4, min_count=3).loop
    assert own == LoopRule(min_size=1, max_size=4, count=3)


def test_thinking_budgets() -> None:
    server = GenerationDefaults(thinking_budget=50)
    assert parse().thinking_budget is None
    assert parse(server).thinking_budget == 50
    assert parse(server, thinking_budget=-1).thinking_budget is None
    assert parse(thinking_budget=0).thinking_budget == 0
    assert parse(thinking_budget=7, reasoning_budget_tokens=3).thinking_budget == 3


def test_the_prompt_cache_may_be_kept_out_and_split() -> None:
    assert parse().cache == CachePolicy()
    assert not parse(cache_prompt=False).cache.use
    assert not parse(extra_body={"cache_prompt": False}).cache.use
    keys = parse(user="u", prompt_cache_key="k"), parse(user="k"), parse(user="u")
    assert len({call.cache.bucket for call in keys}) == 3
    nested = parse(extra_body={"prompt_cache_key": "k"})
    assert nested.cache == parse(prompt_cache_key="k", user="x").cache


def test_n_counts_choices() -> None:
    assert parse().choices == 1
    assert parse(n=128).choices == 128
