"""Everything between a ModelSource and a backend that can run.  Called on the compute thread."""

from __future__ import annotations

from models.backend import Backend
from models.mlx.blas import prepare_blas
from models.source import ModelSource
from models.text_model import TextModel


def load_backend(
    source: ModelSource, *, cpu_dtype: str, threads: int | None
) -> tuple[Backend, TextModel]:
    """Choose a BLAS, load the weights, build the backend.  Raises ModelLoadError."""
    blas = prepare_blas(threads)
    # Only now: the BLAS has to be there when MLX is first imported.
    from models.mlx.backend import MLXBackend
    from models.mlx.weights import load_model

    loaded = load_model(source, cpu_dtype=cpu_dtype)  # type: ignore[arg-type]
    if loaded.notes["device"] == "cpu":
        from models.mlx import cpu_math, rope

        cpu_math.install(loaded.model)
        rope.install(loaded.model, loaded.text.context_length)
    backend = MLXBackend(
        loaded.model,
        model_type=str(loaded.config.get("model_type", "unknown")),
        vocab_size=loaded.text.vocab_size,
        context_length=loaded.text.context_length,
        notes={
            **loaded.notes,
            "blas": blas.library,
            "threads": blas.threads,
            "blas_note": blas.note,
        },
    )
    return backend, loaded.text
