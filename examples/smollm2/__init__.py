"""SmolLM2-135M-Instruct in plain JAX, with its KV cache in blocks.

`weights` fetches the model file, `tokenizer` turns text into ids and back, `model` is
the Llama forward pass: `prefill` for a prompt, `decode_step` for one more token.
"""

from smollm2.model import Config, decode_step, generate, prefill, store_prompt
from smollm2.tokenizer import Tokenizer
from smollm2.weights import fetch, load_params, open_model

__all__ = [
    "Config",
    "Tokenizer",
    "decode_step",
    "fetch",
    "generate",
    "load_params",
    "open_model",
    "prefill",
    "store_prompt",
]
