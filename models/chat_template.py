"""Chat templates: the Jinja dialect that model repositories use, in a sandbox with bounds.

A template comes with the model, its input from the network.  The sandbox keeps a template away from
Python internals and from changing its input; on top of it the text is at most ``MAX_OUTPUT_CHARS``
long, loops make at most ``MAX_LOOP_STEPS`` steps per rendering, and repetition, powers and
``%`` formatting have bounded results.  What is not bounded: a template that keeps doubling a string
by concatenation.  Such a template can only come from whoever chose the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as _LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.errors import ModelLoadError
from models.text_model import TemplateError

MAX_OUTPUT_CHARS: Final = 32 * 1024 * 1024
MAX_LOOP_STEPS: Final = 1_000_000
MAX_REPEAT: Final = 1_000_000  # length of a repeated string or list, width of a format field
MAX_POWER_BITS: Final = 4096
MAX_MESSAGE_CHARS: Final = 500
DEFAULT_TEMPLATE: Final = "default"
TOOL_TEMPLATE: Final = "tool_use"

_STEP_BUDGET: Final = "__loop_steps"
_RENDER_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class _Rejected(Exception):
    """``raise_exception`` was called by the template."""


class _OverBound(Exception):
    """The template wants more text or work than it may have."""


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks text for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012  (the type is jinja2's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "*", (str() | list() | tuple()), int():
                _check_bound(len(left) * right, MAX_REPEAT)
            case "*", int(), (str() | list() | tuple()):
                _check_bound(len(right) * left, MAX_REPEAT)
            case "**", int(), int():
                _check_bound(left.bit_length() * right, MAX_POWER_BITS)
            case "%", str(), _:
                _check_format_width(left)
            case _:
                pass
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Count the steps of every loop by passing what it iterates over through a filter."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(
                loop.iter, _STEP_BUDGET, [], [], None, None, lineno=loop.lineno
            )
        return tree


class ChatTemplate:
    """Compiled template(s) of one model.  Immutable and safe to use from several threads.

    ``templates`` maps a name to the source; "tool_use", when there is one, serves requests with
    tools and "default" all others.  ``variables`` are the special tokens (``bos_token`` ...).
    ``now`` is what ``strftime_now`` shows.  Raises ModelLoadError for a template that does not
    compile.  ``signature`` is equal for equal templates.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        *,
        variables: Mapping[str, str | None] | None = None,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        if not templates:
            raise ValueError("no template")
        environment = _environment(now)
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in templates.items()
            }
            self._reads = {
                name: {
                    variable.name
                    for variable in environment.parse(source).find_all(nodes.Name)
                    if variable.ctx == "load"
                }
                for name, source in templates.items()
            }
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"the model's chat template is not valid (line {error.lineno}: {error.message})"
            ) from error
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelLoadError(f"the model's chat template is not valid ({error})") from error
        self.signature = hashlib.sha256(
            json.dumps(dict(templates), sort_keys=True).encode("utf-8", "surrogatepass")
        ).hexdigest()
        self._variables = {name: text for name, text in (variables or {}).items() if text}

    @property
    def supports_tools(self) -> bool:
        """Whether any template reads ``tools``."""
        return TOOL_TEMPLATE in self._reads or any("tools" in read for read in self._reads.values())

    def reads(self, variable: str) -> bool:
        """Whether any template reads this variable (for example ``enable_thinking``)."""
        return any(variable in read for read in self._reads.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text.  Raises TemplateError with a message for the client.

        ``kwargs`` become variables (``tools``, ``documents``, ``enable_thinking`` ...); they can
        replace special tokens but neither the messages nor ``add_generation_prompt``.
        """
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self._variables,
            **kwargs,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            _STEP_BUDGET: [MAX_LOOP_STEPS],
        }
        template = self._select(with_tools=bool(variables["tools"]))
        try:
            return _bounded(template.generate(variables))
        except _Rejected as error:
            raise TemplateError(
                f"the model's chat template rejected this request: {_one_line(str(error))}"
            ) from error
        except _OverBound as error:
            raise TemplateError(
                f"the model's chat template exceeded its limits: {error}"
            ) from error
        except jinja2.UndefinedError as error:
            raise TemplateError(
                f"the model's chat template cannot render this request: {_one_line(str(error))}"
            ) from error
        except _RENDER_ERRORS as error:
            raise TemplateError(
                f"the model's chat template cannot render this request ({type(error).__name__})"
            ) from error

    def _select(self, *, with_tools: bool) -> jinja2.Template:
        wanted = TOOL_TEMPLATE if with_tools else DEFAULT_TEMPLATE
        for name in (wanted, DEFAULT_TEMPLATE):
            if name in self._templates:
                return self._templates[name]
        return next(iter(self._templates.values()))


def parse_templates(value: object) -> dict[str, str]:
    """Templates out of ``tokenizer_config.json``: one string, or a list of name and template."""
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, Mapping):
        return {str(name): text for name, text in value.items() if isinstance(text, str)}
    if not isinstance(value, list):
        return {}
    return {
        str(entry["name"]): entry["template"]
        for entry in value
        if isinstance(entry, dict) and "name" in entry and isinstance(entry.get("template"), str)
    }


def _environment(now: Callable[[], datetime]) -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_LoopControls, _GenerationTag]
    )
    environment.globals.pop("lipsum", None)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    environment.filters["tojson"] = _tojson
    environment.filters[_STEP_BUDGET] = _count_steps
    return environment


def _raise_exception(message: object = "") -> NoReturn:
    raise _Rejected(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as prompts need it: no HTML escapes, characters as they are."""
    if indent is not None:
        _check_bound(indent, 64)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )


@jinja2.pass_context
def _count_steps(context: jinja2.runtime.Context, values: Iterable[Any]) -> Iterable[Any]:
    budget = context.get(_STEP_BUDGET)
    if budget is None or isinstance(values, jinja2.Undefined):
        return values
    return _counted(values, budget)


def _counted(values: Iterable[Any], budget: list[int]) -> Iterator[Any]:
    for value in values:
        budget[0] -= 1
        if budget[0] < 0:
            raise _OverBound("too many loop steps")
        yield value


def _bounded(pieces: Iterator[str]) -> str:
    out: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_OUTPUT_CHARS:
            raise _OverBound("the prompt is too long")
        out.append(piece)
    return "".join(out)


def _check_bound(size: int, bound: int) -> None:
    if size > bound:
        raise _OverBound("a value is too large")


def _check_format_width(pattern: str) -> None:
    digits = 0
    for char in pattern:
        digits = digits + 1 if char.isdigit() else 0
        _check_bound(digits, 6)
    # ``*`` takes the width from the arguments.
    if "%" in pattern and "*" in pattern:
        raise _OverBound("a format takes its width from a value")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE_CHARS else line[:MAX_MESSAGE_CHARS] + "..."
