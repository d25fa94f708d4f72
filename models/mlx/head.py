"""Computing the output head for the last position only, in any mlx-lm architecture.

The head is a product with a [vocabulary, width] matrix; over a prompt chunk it costs as much as
many layers, and nobody reads the logits of any position but the last.  mlx-lm's models call their
head as ``lm_head`` or, where it is shared with the embedding, as ``as_linear``.
"""

from __future__ import annotations

from typing import Any, Final

HEAD: Final = "lm_head"
# Inside a layer these names mean something else.
TOP_LEVEL_HEADS: Final = ("output", "embed_out")


class LastPositionHead:
    """While ``on``, the model's logits are [B, 1, V]; they stay [B, n, V] where no head is found.

    The model's parameters keep their names: only the classes of two modules are replaced by
    subclasses.
    """

    def __init__(self, model: Any) -> None:
        self.on = False
        for name, module in model.named_modules():
            if hasattr(module, "as_linear"):
                module.__class__ = self._narrowed(type(module), "as_linear")
            elif name.rpartition(".")[2] == HEAD or name in TOP_LEVEL_HEADS:
                module.__class__ = self._narrowed(type(module), "__call__")

    def __call__(self, model: Any, inputs: Any, caches: list[Any]) -> Any:
        """Run the model; [B, n] tokens -> [B, V] logits of the last position."""
        self.on = True
        try:
            logits = model(inputs, cache=caches)
        finally:
            self.on = False
        return logits[:, -1, :]

    def _narrowed(self, base: type, method: str) -> type:
        original = getattr(base, method)

        def last_only(module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            if self.on and x.ndim == 3 and x.shape[1] > 1:
                x = x[:, -1:, :]
            return original(module, x, *args, **kwargs)

        return type(base.__name__, (base,), {method: last_only})
