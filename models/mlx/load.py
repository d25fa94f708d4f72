"""Everything between a ModelSource and a backend that can run.  Called on the compute thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.backend import Backend
from models.errors import ModelLoadError
from models.mlx.blas import BlasReport, prepare_blas
from models.source import ModelSource
from models.text_model import TextModel

if TYPE_CHECKING:
    from models.mlx.weights import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How sequences are computed and their caches held; see models.mlx.backend.MLXBackend."""

    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    deterministic: bool = False


DEFAULT_OPTIONS = EngineOptions()


def load_backend(
    source: ModelSource,
    *,
    cpu_dtype: str,
    threads: int | None,
    options: EngineOptions = DEFAULT_OPTIONS,
) -> tuple[Backend, TextModel]:
    """Choose a BLAS, load the weights, build the backend.  Raises ModelLoadError."""
    blas = prepare_blas(threads)
    # Only now: the BLAS has to be there when MLX is first imported.
    from models.mlx.kv_quant import UnsupportedCaches
    from models.mlx.weights import load_model

    loaded = load_model(source, cpu_dtype=cpu_dtype)  # type: ignore[arg-type]
    if loaded.notes["device"] == "cpu":
        import mlx.core as mx

        from models.mlx import cpu_math, rope
        from models.mlx.heap import return_freed_memory, set_limits

        set_limits()
        mx.set_cache_limit(0)  # the heap keeps what is worth keeping
        cpu_math.install(loaded.model)
        rope.install(loaded.model, loaded.text.context_length)
    try:
        backend = _backend(loaded, blas, options)
    except UnsupportedCaches as error:
        raise ModelLoadError(str(error)) from error
    if loaded.notes["device"] == "cpu":
        return_freed_memory()
    return backend, loaded.text


def _backend(loaded: LoadedModel, blas: BlasReport, options: EngineOptions) -> Backend:
    from models.mlx.backend import MLXBackend
    from models.mlx.fingerprint import fingerprint

    return MLXBackend(
        loaded.model,
        model_type=str(loaded.config.get("model_type", "unknown")),
        vocab_size=loaded.text.vocab_size,
        context_length=loaded.text.context_length,
        max_kv_size=options.max_kv_size,
        kv_bits=options.kv_bits,
        kv_group_size=options.kv_group_size,
        deterministic=options.deterministic,
        fingerprint=fingerprint(loaded.model, loaded.config, options),
        notes={
            **loaded.notes,
            "blas": blas.library,
            "threads": blas.threads,
            "kv_bits": options.kv_bits,
            "max_kv_size": options.max_kv_size,
            "deterministic": options.deterministic,
            "blas_note": blas.note,
        },
    )
