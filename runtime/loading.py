"""From settings to a model that is ready: find the files, load them on the compute thread."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

import trio

from actors.kit.seams import Seams
from actors.ports import ServedModel
from models.compute_thread import ComputeThread
from models.mlx.load import load_backend
from models.source import ModelSource, resolve_source
from models.threaded_engine import ThreadedEngine
from runtime.config import ServerConfig
from runtime.tree import Loaded

log = logging.getLogger("mlxcel.load")


async def load(config: ServerConfig, thread: ComputeThread, seams: Seams) -> Loaded:
    """Raises ModelLoadError and ConfigError.  The event loop stays free all the while."""
    source = await trio.to_thread.run_sync(partial(_resolve, config), abandon_on_cancel=True)
    log.info("loading %s from %s", source.name, source.origin)
    started = trio.current_time()
    backend, text = await thread.run_job(
        partial(
            load_backend,
            source,
            cpu_dtype=config.cpu_dtype,
            threads=config.threads,
            options=config.engine_options,
        )
    )
    engine = ThreadedEngine(thread=thread, backend=backend)
    if backend.info.notes.get("blas") == "bundled":
        log.warning("no fast BLAS: %s", backend.info.notes.get("blas_note"))
    limits = config.loaded_limits(backend.info)
    if limits.max_slots < config.slots:
        log.warning(
            "the caches of this model cannot be batched: %d slot instead of %d",
            limits.max_slots,
            config.slots,
        )
    notes = {
        **backend.info.notes,
        "load_s": round(trio.current_time() - started, 2),
    }
    model = ServedModel(
        name=config.alias or text.name,
        context_length=limits.slot_context_tokens,
        vocab_size=text.vocab_size,
        has_chat_template=text.has_chat_template,
        supports_tools=text.supports_tools,
        created_s=int(seams.wall_time()),
        notes=notes,
    )
    return Loaded(engine=engine, text=text, limits=limits, model=model)


def _resolve(config: ServerConfig) -> ModelSource:
    cache = None if config.cache_dir is None else Path(config.cache_dir).expanduser()
    return resolve_source(
        config.model,
        revision=config.revision,
        offline=config.offline,
        cache_dir=cache,
        token=config.hf_token,
        progress=sys.stderr.isatty(),
    )
