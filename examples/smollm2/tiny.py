"""A small model of SmolLM2's shape with random weights: nothing to download."""

import jax
import jax.numpy as jnp
import numpy as np

from smollm2.model import Config, Params

CONFIG = Config(
    num_layers=3,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_base=10000.0,
    norm_eps=1e-5,
)
VOCABULARY = 256


def random_params(seed: int = 0) -> Params:
    """Normal weights, the same on every device.

    The embedding is small and the layers are not, so that what comes next depends on
    every token before and not on the last one alone.
    """
    random = np.random.default_rng(seed)
    layers, width = CONFIG.num_layers, CONFIG.width
    heads = CONFIG.num_heads * CONFIG.head_dim
    kv_heads = CONFIG.num_kv_heads * CONFIG.head_dim

    def draw(*shape: int, scale: float) -> jax.Array:
        return jnp.asarray(scale * random.standard_normal(shape), jnp.float32)

    def matrix(outputs: int, inputs: int) -> jax.Array:
        return draw(layers, outputs, inputs, scale=2 * inputs**-0.5)

    return {
        "embedding": draw(VOCABULARY, width, scale=0.1),
        "layers": {
            "attn_norm": jnp.ones((layers, width)),
            "q": matrix(heads, width),
            "k": matrix(kv_heads, width),
            "v": matrix(kv_heads, width),
            "out": matrix(width, heads),
            "mlp_norm": jnp.ones((layers, width)),
            "gate": matrix(2 * width, width),
            "up": matrix(2 * width, width),
            "down": matrix(width, 2 * width),
        },
        "final_norm": jnp.ones(width),
    }
