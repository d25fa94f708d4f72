"""The text side of a Hugging Face style model: tokenizer and chat template together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.chat_template import DEFAULT_TEMPLATE, ChatTemplate, parse_templates
from models.errors import ModelLoadError
from models.text_model import IncrementalDecoder, TemplateError
from models.thinking import ThinkingMarkers, find_markers
from models.tokenizer import TextTokenizer, load_folder, read_json


class HFTextModel:
    """:class:`models.text_model.TextModel` out of a tokenizer and an optional chat template."""

    def __init__(
        self,
        *,
        name: str,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None,
        vocab_size: int,
        context_length: int,
    ) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._thinking = find_markers(tokenizer.raw.token_to_id, tokenizer.newline_ids)

    @property
    def name(self) -> str:
        return self._name

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._tokenizer.eos_ids

    @property
    def newline_ids(self) -> frozenset[int]:
        return self._tokenizer.newline_ids

    @property
    def thinking(self) -> ThinkingMarkers | None:
        return self._thinking

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def supports_tools(self) -> bool:
        return self._template is not None and self._template.supports_tools

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._tokenizer

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        if self._template is None:
            raise TemplateError("this model has no chat template")
        return self._template.render(
            messages, kwargs=kwargs, add_generation_prompt=add_generation_prompt
        )

    def template_signature(self, kwargs: Mapping[str, Any]) -> str:
        source = "" if self._template is None else self._template.signature
        return source + json.dumps(dict(kwargs), sort_keys=True, default=str)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """A rendered chat already holds its BOS: encode it with ``add_special=False``."""
        return self._tokenizer.encode(text, add_special=add_special)

    def decoder(self) -> IncrementalDecoder:
        return self._tokenizer.decoder()

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)


def load_folder_text(folder: Path, config: Mapping[str, Any], *, name: str) -> HFTextModel:
    """The text side of a model folder.  Raises ModelLoadError."""
    tokenizer = load_folder(folder, config)
    templates = folder_templates(folder)
    return HFTextModel(
        name=name,
        tokenizer=tokenizer,
        template=(
            ChatTemplate(templates, variables=tokenizer.special.variables) if templates else None
        ),
        vocab_size=config_int(config, "vocab_size") or tokenizer.vocab_size,
        context_length=_context_length(folder, config),
    )


def folder_templates(folder: Path) -> dict[str, str]:
    """Template sources by name: ``chat_template.jinja`` (and ``additional_chat_templates``) first,
    else ``chat_template.json``, else ``tokenizer_config.json``."""
    templates = parse_templates(read_json(folder / "tokenizer_config.json").get("chat_template"))
    separate = read_json(folder / "chat_template.json").get("chat_template")
    templates.update(parse_templates(separate))
    extra = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for path in [*extra, folder / "chat_template.jinja"]:
        name = DEFAULT_TEMPLATE if path.parent == folder else path.stem
        try:
            templates[name] = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
    return templates


def config_int(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these settings that is a positive number, also inside ``text_config``."""
    inner = config.get("text_config")
    for source in (config, inner if isinstance(inner, Mapping) else {}):
        for name in names:
            value = source.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _context_length(folder: Path, config: Mapping[str, Any]) -> int:
    found = config_int(
        config, "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"
    )
    if found is not None:
        return found
    stated = read_json(folder / "tokenizer_config.json").get("model_max_length")
    # Tokenizers without a limit state an absurdly large one.
    if isinstance(stated, int) and 0 < stated < 2**31:
        return stated
    return 4096
