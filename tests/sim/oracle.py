"""What a request must get, computed in the most naive way from its prompt and the engine's script.

Shares no code with the actors: stop strings are searched in the whole text again after each token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from actors.limits import Limits
from actors.requests import ChatPrompt, GenerationRequest, LoopRule, Prompt, TextPrompt, TokenPrompt
from models.scripted import ScriptedEngine
from models.scripted_text import EOS_ID, VOCAB_SIZE, ScriptedTextModel
from models.text_model import TemplateError
from tests.sim.run import RequestFacts


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    text: str
    reason: str


def prompt_ids(prompt: Prompt, text: ScriptedTextModel) -> tuple[int, ...]:
    """Empty when the template refuses."""
    match prompt:
        case ChatPrompt(messages=messages, template_kwargs=kwargs):
            try:
                rendered = text.render_chat(messages, kwargs=kwargs)
            except TemplateError:
                return ()
            return tuple(text.encode(rendered, add_special=False))
        case TextPrompt(text=string, add_special=add_special):
            return tuple(text.encode(string, add_special=add_special))
        case TokenPrompt(token_ids=ids):
            return ids


def answer(script: tuple[int, ...], request: GenerationRequest, max_tokens: int) -> Answer:
    """The script, followed by end tokens for ever, cut at the first thing that ends it."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        token = script[len(tokens)] if len(tokens) < len(script) else EOS_ID
        ends = not request.ignore_eos and len(tokens) >= request.min_tokens
        if token == EOS_ID and ends:
            return Answer(tuple(tokens), _text(tokens), "stop")
        tokens.append(token)
        cut = cut_at_stop(_text(tokens), request.stop)
        if cut is not None:
            return Answer(tuple(tokens), cut, "stop_string")
        if request.loop is not None and loops(tokens, request.loop):
            return Answer(tuple(tokens), _text(tokens), "loop")
    return Answer(tuple(tokens), _text(tokens), "length")


def loops(tokens: list[int], rule: LoopRule) -> bool:
    """Whether ``tokens`` end with the same block, ``count`` times in a row."""
    for size in range(rule.min_size, rule.max_size + 1):
        tail = tokens[-size * rule.count :]
        if len(tail) == size * rule.count and tail == tail[:size] * rule.count:
            return True
    return False


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """``text`` before the stop string that is completed first (the longest of those); or None."""
    for end in range(len(text) + 1):
        found = [one for one in stop if text[:end].endswith(one)]
        if found:
            return text[: end - max(map(len, found))]
    return None


def _text(tokens: list[int]) -> str:
    """Special tokens have no text; an unfinished character at the end is dropped."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", errors="ignore")


def facts(
    request: GenerationRequest,
    *,
    engine: ScriptedEngine,
    text: ScriptedTextModel,
    limits: Limits,
    sent_s: float,
    patient: bool,
    choice: int = 0,
) -> RequestFacts:
    """``choice`` of several draws with a seed of its own."""
    sampling = replace(request.sampling, seed=(request.sampling.seed + choice) % 2**64)
    ids = prompt_ids(request.prompt, text)
    room = min(limits.slot_context_tokens, limits.cache_budget_tokens) - len(ids)
    if request.max_tokens is None:
        max_tokens = max(1, room)
    else:
        max_tokens = min(request.max_tokens, limits.slot_context_tokens - len(ids))
    valid = (
        0 < len(ids) < limits.slot_context_tokens
        and max(ids) < VOCAB_SIZE
        and len(ids) + max_tokens <= limits.cache_budget_tokens
    )
    expected = Answer((), "", "length")
    if valid:
        expected = answer(
            tuple(engine.script_for(ids, sampling)),
            request,
            max_tokens,
        )
    return RequestFacts(
        rid=f"{request.request_id}#{choice}" if choice else request.request_id,
        prompt=ids,
        lane=request.lane,
        prompt_tokens=len(ids),
        max_tokens=max_tokens,
        tokens=expected.tokens,
        text=expected.text,
        reason=expected.reason,
        deadline_s=min(request.deadline_s, sent_s + limits.request_timeout_s),
        patient=patient,
        valid=valid,
    )
