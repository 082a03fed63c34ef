"""SmolLM2-135M reading a text: queries, keys and values of its layers, and its loss.

The model is that of the examples, `examples/smollm2/`, which also fetches its weights;
reading these takes the packages gguf and tokenizers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import flash_attention
from support import common

sys.path.insert(0, str(common.ROOT / "examples"))
from smollm2 import tiny
from smollm2.model import Config, finish_layer, project_qkv, read_logits

# Of a layer's number and q [1, T, N, D], k and v [1, T, K, D].
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
Activations = dict[int, tuple[np.ndarray, ...]]
ROWS = 256  # whose logits are in memory at once


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    config: Config
    params: Any
    encode: Callable[[str], Any]

    def tokens(self, text: str) -> np.ndarray:
        return np.asarray(self.encode(text), np.int32)

    def read(
        self, tokens: np.ndarray, attend: Attend | None = None, keep: Any = ()
    ) -> tuple[float, Activations]:
        """Nats a token, of what comes next; q, k and v of the layers in `keep`.

        These are `[1, T, heads, D]`, rotated, as attention is given them.
        """
        config, params = self.config, self.params
        x, at = params["embedding"][tokens], jnp.arange(len(tokens))
        kept: Activations = {}
        for i in range(config.num_layers):
            weights = jax.tree.map(lambda w, i=i: w[i], params["layers"])
            qkv = [a[None] for a in _project(config, weights, x, at)]
            if i in keep:
                kept[i] = tuple(np.asarray(a) for a in qkv)
            o = _causal(*qkv) if attend is None else attend(i, *qkv)
            x = _finish(config, weights, x, o[0])
        return float(_loss(config, params, x, jnp.asarray(tokens))), kept


def smollm2(path: Path | None) -> Model:
    """From its GGUF file, which is fetched where no path is given (93 MB, once)."""
    from smollm2.tokenizer import Tokenizer
    from smollm2.weights import MODEL, fetch, load_params, open_model

    config, reader = open_model(path or fetch())
    params = load_params(config, reader)
    return Model(MODEL.removesuffix(".gguf"), config, params, Tokenizer(reader).encode)


def random_model() -> Model:
    """A small one of its shape, that has learned nothing and reads bytes."""

    def encode(text: str) -> list[int]:
        return list(text.encode())

    return Model("random weights", tiny.CONFIG, tiny.random_params(), encode)


def text_of(name: str) -> str:
    """A text that comes with Python.

    "reference 3": the fourth twelfth of the language's reference; "file NAME": one
    beside the modules; else the source of the modules that are named.
    """
    first, *rest = name.split()
    if first == "reference":
        from pydoc_data.topics import topics

        whole = "\n\n".join(topics[topic] for topic in sorted(topics))
        start = int(rest[0]) * len(whole) // 12
        return whole[start : start + len(whole) // 12]
    if first == "file":
        return (Path(os.__file__).parent / rest[0]).read_text(encoding="utf-8")
    modules = [importlib.import_module(module) for module in (first, *rest)]
    return "\n\n".join(inspect.getsource(module) for module in modules)


_project = jax.jit(project_qkv, static_argnums=0)
_finish = jax.jit(finish_layer, static_argnums=0)


@jax.jit
def _causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return flash_attention(q, k, v, causal=True)


@functools.partial(jax.jit, static_argnums=0)
def _loss(config: Config, params: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
    def one(of: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, token = of
        scores = read_logits(config, params, row[None])[0]
        return -jax.nn.log_softmax(scores)[token]

    return jax.lax.map(one, (x[:-1], tokens[1:]), batch_size=ROWS).mean()
