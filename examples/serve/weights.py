"""The weights of a model, from wherever they are kept, as JAX arrays."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from serve.config import Config, UnknownModelError

Params = dict[str, Any]
# Parts of a layer. Those of one line are multiplied by at once, and lie in one array.
TOGETHER = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
ALONE = ("out", "down")
NORMS = ("attn_norm", "mlp_norm")
HEAD_NORMS = ("q_norm", "k_norm")  # Qwen 3


class Source(ABC):
    """A model in a file or folder, by our names of its parts."""

    tied: bool | None = None  # None: where there is no head, the embedding is it

    @abstractmethod
    def config(self) -> Config:
        """What shapes the model."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """Names of all tensors, but for those that `config` read."""

    @abstractmethod
    def name_of(self, part: str, kind: str, layer: int | None = None) -> str:
        """The name of a part's "weight" or "bias"."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """A tensor as float32: a matrix is [outputs, inputs]."""


def load_params(source: Source, config: Config, dtype: Any) -> Params:
    """All weights: matrices in `dtype`, norms and biases in float32.

    Returns:
        "embedding" [vocabulary, width], "head" alike unless it is the embedding,
        "final_norm" [width], and "layers", a dictionary for each: "qkv", "out",
        "gate_up" and "down" [outputs, inputs], with "_bias" behind the name
        [outputs] where the model has biases, "attn_norm", "mlp_norm", and perhaps
        "q_norm" and "k_norm".

    Raises:
        UnknownModelError: for a tensor that is missing, has another shape than the
            config says, or is nothing that is known: then the model is another one.
    """
    left = set(source.names())

    def has(part: str, kind: str, layer: int | None = None) -> bool:
        return source.name_of(part, kind, layer) in left

    def take(part: str, kind: str, shape: tuple, layer: int | None = None) -> Any:
        name = source.name_of(part, kind, layer)
        if name not in left:
            raise UnknownModelError(f"the weights {name} are missing")
        left.remove(name)
        found = source.read(name)
        if found.shape != shape:
            raise UnknownModelError(
                f"{name} must be {list(shape)}, got {list(found.shape)}"
            )
        return found

    c, width = config, config.width
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    inner = _inner_width(source, left)
    shapes = {
        "q": (heads, width),
        "k": (kv_heads, width),
        "v": (kv_heads, width),
        "out": (width, heads),
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
    }

    def matrix(parts: tuple[str, ...], layer: int) -> tuple[Any, Any]:
        taken = [take(part, "weight", shapes[part], layer) for part in parts]
        weight = jnp.asarray(np.concatenate(taken)).astype(dtype)
        if not any(has(part, "bias", layer) for part in parts):
            return weight, None
        taken = [
            take(part, "bias", shapes[part][:1], layer)
            if has(part, "bias", layer)
            else np.zeros(shapes[part][0], np.float32)
            for part in parts
        ]
        return weight, jnp.asarray(np.concatenate(taken))

    def layer_of(i: int) -> Params:
        made: Params = {}
        for name, parts in (*TOGETHER.items(), *((part, (part,)) for part in ALONE)):
            made[name], bias = matrix(parts, i)
            if bias is not None:
                made[f"{name}_bias"] = bias
        for part in NORMS:
            made[part] = jnp.asarray(take(part, "weight", (width,), i))
        for part in HEAD_NORMS:
            if has(part, "weight", i):
                made[part] = jnp.asarray(take(part, "weight", (c.head_dim,), i))
        return made

    vocabulary = (c.vocab_size, width)
    params: Params = {
        "embedding": jnp.asarray(take("embedding", "weight", vocabulary)).astype(dtype),
        "final_norm": jnp.asarray(take("final_norm", "weight", (width,))),
        "layers": [layer_of(i) for i in range(c.num_layers)],
    }
    if has("head", "weight") or source.tied is False:
        head = jnp.asarray(take("head", "weight", vocabulary)).astype(dtype)
        if not source.tied:  # some files have the tied one twice
            params["head"] = head
    if left:
        some = ", ".join(sorted(left)[:3])
        raise UnknownModelError(
            f"{len(left)} tensors are none of a Llama's, such as {some}"
        )
    return params


def _inner_width(source: Source, names: set[str]) -> int:
    name = source.name_of("gate", "weight", 0)
    if name not in names:
        raise UnknownModelError(f"the weights {name} are missing")
    return source.read(name).shape[0]


def num_weights(params: Params) -> int:
    """How many numbers they are."""
    return sum(x.size for x in jax.tree.leaves(params))
