"""Folders to tokenizers and templates: BOS once, every source of end tokens, clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from models.errors import ModelLoadError
from models.text import load_folder_text
from models.text_model import TemplateError
from models.tokenizer import load_folder
from tests.unit.tokenizers_for_tests import byte_level

BOS = "<|bos|>"
END = "<|im_end|>"


def write_folder(folder: Path, *, with_processor: bool = True, **files: Any) -> Path:
    tokenizer = byte_level()
    if with_processor:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_bos_is_added_once_even_when_written(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer_config={"bos_token": {"content": BOS}})
    tokenizer = load_folder(folder, {})
    plain = tokenizer.encode("the cap", add_special=False)
    assert tokenizer.encode("the cap", add_special=True) == [0, *plain]
    assert tokenizer.encode(f"{BOS}the cap", add_special=True) == [0, *plain]
    assert tokenizer.encode(f"{BOS}the cap", add_special=False) == [0, *plain]


def test_add_bos_token_counts_without_a_post_processor(tmp_path: Path) -> None:
    config = {"bos_token": BOS, "add_bos_token": True}
    folder = write_folder(tmp_path, with_processor=False, tokenizer_config=config)
    tokenizer = load_folder(folder, {})
    assert tokenizer.encode("the", add_special=True)[0] == 0
    assert tokenizer.encode("the", add_special=False)[0] != 0
    config["add_bos_token"] = False
    folder = write_folder(tmp_path, with_processor=False, tokenizer_config=config)
    assert load_folder(folder, {}).encode("the", add_special=True)[0] != 0


def test_prompts_are_neither_cut_nor_padded(tmp_path: Path) -> None:
    tokenizer = load_folder(write_folder(tmp_path), {})
    assert len(tokenizer.encode("abcdefghijkl", add_special=False)) == 12
    assert len(tokenizer.encode("a", add_special=False)) == 1


def test_end_tokens_are_the_union_of_all_sources(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        generation_config={"eos_token_id": [7, 8]},
        tokenizer_config={"eos_token": END},
    )
    config = {"eos_token_id": 9, "text_config": {"eos_token_id": [10]}}
    assert load_folder(folder, config).eos_ids == {1, 7, 8, 9, 10}


def test_no_end_token_anywhere(tmp_path: Path) -> None:
    assert load_folder(write_folder(tmp_path), {"eos_token_id": None}).eos_ids == frozenset()


def test_lone_surrogates_do_not_raise(tmp_path: Path) -> None:
    tokenizer = load_folder(write_folder(tmp_path), {})
    assert tokenizer.encode("a\ud800b", add_special=False) == tokenizer.encode(
        "a\ufffdb", add_special=False
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "not valid JSON"),
        ("tokenizer.json", "[]", "not a tokenizer file"),
        ("tokenizer.json", '{"model": {"type": "Nothing"}}', "cannot be read as a tokenizer"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "does not hold a JSON object"),
    ],
)
def test_broken_files_are_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    folder = write_folder(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_folder(folder, {})
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_model_of_a_folder(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        tokenizer_config={
            "bos_token": BOS,
            "eos_token": END,
            "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        },
    )
    text = load_folder_text(
        folder, {"vocab_size": 400, "max_position_embeddings": 128}, name="tiny"
    )
    assert (text.name, text.vocab_size, text.context_length) == ("tiny", 400, 128)
    assert text.has_chat_template
    assert not text.supports_tools
    prompt = text.render_chat([{"role": "user", "content": "the"}], kwargs={})
    assert prompt == f"{BOS}the{END}"
    ids = text.encode(prompt, add_special=False)
    assert (ids[0], ids[-1]) == (0, 1)
    decoder = text.decoder()
    assert "".join(map(decoder.push, ids)) == "the"


def test_a_jinja_file_wins_over_the_configuration(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer_config={"chat_template": "old"})
    (folder / "chat_template.jinja").write_text("new")
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("tools")
    text = load_folder_text(folder, {}, name="tiny")
    assert text.render_chat([], kwargs={}) == "new"
    assert text.render_chat([], kwargs={"tools": [1]}) == "tools"


def test_no_chat_template_is_said_when_one_is_needed(tmp_path: Path) -> None:
    text = load_folder_text(write_folder(tmp_path), {}, name="tiny")
    assert not text.has_chat_template
    with pytest.raises(TemplateError, match="no chat template"):
        text.render_chat([], kwargs={})
