"""From files to a model that can run: weights, their dtype, and the text side.

Everything here runs on the compute thread, which then owns the arrays.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from models.errors import ModelLoadError
from models.gguf_file import GGUFFile, read_gguf
from models.mlx.gguf import gguf_config, gguf_model, gguf_text
from models.mlx.lm import mlx_lm_utils
from models.source import ModelSource
from models.text import load_folder_text
from models.text_model import TextModel
from models.tokenizer import read_json

CpuDtype = Literal["auto", "float32", "keep"]

# float32 weights may take the available memory less this much for caches and everything else.
HEADROOM_BYTES: Final = 1 << 30
HEADROOM_SHARE: Final = 0.15
INDEX_FILE: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 100 * 1024 * 1024

Note = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready for the backend; ``notes`` are the choices made, for the log and /props."""

    model: nn.Module
    config: dict[str, Any]
    text: TextModel
    notes: dict[str, Note] = field(default_factory=dict)


def available_memory() -> int | None:
    """Bytes that can be taken without swapping, within the container's limit; None: unknown."""
    bounds: list[int] = []
    try:
        free = re.search(r"^MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if free is not None:
            bounds.append(int(free[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        if limit != "max":
            bounds.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        pass  # not Linux, or no control group: what was found so far counts
    return min(bounds, default=None)


def load_model(
    source: ModelSource,
    *,
    cpu_dtype: CpuDtype = "auto",
    memory: Callable[[], int | None] = available_memory,
) -> LoadedModel:
    """Load the model, evaluate its weights once.  Raises ModelLoadError.

    On the CPU backend "float32" turns every weight into float32 (dequantised), which is what its
    fast matrix products need; "auto" does so if memory allows; "keep" leaves them.  On a GPU they
    are always kept.  Compilation is switched off on the CPU: it would call a C++ compiler.
    """
    on_cpu = bool(mx.default_device() == mx.Device(mx.cpu))
    if on_cpu:
        mx.disable_compile()
    if source.kind == "gguf":
        return _load_gguf(source, cpu_dtype if on_cpu else "keep", memory)
    return _load_folder(source, cpu_dtype if on_cpu else "keep", memory)


def _load_gguf(
    source: ModelSource, dtype: CpuDtype, memory: Callable[[], int | None]
) -> LoadedModel:
    file = read_gguf(source.path)
    config = gguf_config(file)
    text = gguf_text(file, config, name=source.name)
    count = _gguf_parameters(file)
    mlx_lm_utils()
    model = gguf_model(file, config, dequantize=_to_float32(dtype, count, memory))
    kinds = sorted({info.type_name for info in file.tensors.values() if len(info.shape) > 1})
    notes = _notes(model, count, f"GGUF {', '.join(kinds)}")
    return LoadedModel(model=model, config=config, text=text, notes=notes)


def _gguf_parameters(file: GGUFFile) -> int:
    return sum(math.prod(info.shape) for info in file.tensors.values())


def _load_folder(
    source: ModelSource, dtype: CpuDtype, memory: Callable[[], int | None]
) -> LoadedModel:
    folder = source.path
    config_file = read_json(folder / "config.json")
    if not isinstance(config_file.get("model_type"), str):
        raise ModelLoadError(f"{folder / 'config.json'} has no model_type")
    check_safetensors(folder)
    text = load_folder_text(folder, config_file, name=source.name)
    utils = mlx_lm_utils()
    try:
        utils._get_classes(config_file)
    except ValueError as error:
        raise ModelLoadError(
            f"the architecture {config_file['model_type']!r} of {folder} is not supported"
        ) from error
    try:
        model, config = utils.load_model(folder, lazy=True)
        count = int(utils.get_total_parameters(model))
        if _to_float32(dtype, count, memory):
            model = _as_float32(model, utils.dequantize_model)
        mx.eval(model.parameters())
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError) as error:
        raise ModelLoadError(f"the weights of {folder} cannot be loaded: {error}") from error
    return LoadedModel(
        model=model,
        config=config,
        text=text,
        notes=_notes(model, count, _quantization(config)),
    )


def check_safetensors(folder: Path) -> None:
    """Every weight file is there and complete, so that reading it later cannot fail half-way."""
    index = read_json(folder / INDEX_FILE).get("weight_map", {})
    names = {str(name) for name in index.values()} if isinstance(index, dict) else set()
    for name in sorted(names):
        if not (folder / name).is_file():
            raise ModelLoadError(
                f"the model folder {folder} lacks {name}, which {INDEX_FILE} names"
            )
    # mlx-lm reads the files of this pattern.
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise ModelLoadError(f"the model folder {folder} has no model*.safetensors file")
    for path in paths:
        _check_weight_file(path)


def _check_weight_file(path: Path) -> None:
    """The header is JSON and the data it points to ends with the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ModelLoadError(f"{path} is not a valid safetensors file")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        end = 8 + length + max(ends, default=0)
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a valid safetensors file") from error
    if end > size:
        raise ModelLoadError(f"{path} is truncated: it has {size} of {end} bytes")


def _to_float32(dtype: CpuDtype, parameters: int, memory: Callable[[], int | None]) -> bool:
    if dtype != "auto":
        return dtype == "float32"
    free = memory()
    needed = parameters * 4
    return free is None or needed * (1 + HEADROOM_SHARE) + HEADROOM_BYTES <= free


def _as_float32(model: nn.Module, dequantize: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Dequantised with float32 scales: rounding products to 16 bits first would lose digits."""

    def widen(value: Any) -> Any:
        if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
            return value.astype(mx.float32)
        return value

    model.update(tree_map(widen, model.parameters()))
    model = dequantize(model)
    model.update(tree_map(widen, model.parameters()))
    return model


def _quantization(config: Mapping[str, Any]) -> str | None:
    settings = config.get("quantization") or config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return None
    return f"{settings.get('bits', '?')} bits, groups of {settings.get('group_size', '?')}"


def _notes(model: nn.Module, parameters: int, quantization: str | None) -> dict[str, Note]:
    arrays = [array for _, array in tree_flatten(model.parameters())]
    floating = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
    packed = any(array.dtype == mx.uint32 for array in arrays)
    largest = max(floating, key=lambda array: int(array.size)) if floating else None
    dtype = "quantised" if packed else str(getattr(largest, "dtype", "none")).rpartition(".")[2]
    return {
        "device": str(mx.default_device()).removeprefix("Device(").split(",")[0],
        "dtype": dtype,
        "parameters": parameters,
        "weight_bytes": sum(int(array.nbytes) for array in arrays),
        "stored_as": quantization,
    }
