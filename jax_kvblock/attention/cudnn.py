"""`implementation="cudnn"`: cuDNN's attention, through jax.nn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.attention.config import OPEN, AttentionConfig, Operands


def attention(config: AttentionConfig, x: Operands, return_residual: bool) -> Any:
    """The call by `jax.nn.dot_product_attention(implementation="cudnn")`."""
    window = None
    if config.window_left != OPEN:
        window = (config.window_left, 0)
    attend: Any = jax.nn.dot_product_attention
    return attend(
        x.q,
        x.k,
        x.v,
        bias=x.bias,
        scale=config.scale,
        is_causal=config.window_right == 0,
        query_seq_lengths=x.q_lens,
        key_value_seq_lengths=x.kv_lens,
        local_window_size=window,
        implementation="cudnn",
        return_residual=return_residual,
    )


def unserved(config: AttentionConfig, x: Operands, return_lse: bool) -> list[str]:
    """What of a call cuDNN does not serve through jax.nn."""
    missing = []
    if return_lse:
        missing.append("return_lse: its log-sum-exp has q's dtype and no gradient")
    if x.q.dtype not in (jnp.bfloat16, jnp.float16):
        missing.append(f"dtype {x.q.dtype} (bfloat16 and float16 are served)")
    if config.window_right not in (OPEN, 0):
        missing.append("a window to the right (window=(left, 0) is served)")
    if config.window_left != OPEN and config.window_right == OPEN:
        missing.append(
            "a window that is open to the right (window=(left, 0) is served)"
        )
    if (x.q_lens is None) != (x.kv_lens is None):
        missing.append("q_lens without kv_lens (both together are served)")
    given = {
        "softcap": config.softcap,
        "deterministic=True": config.deterministic,
        "cu_seqlens": config.packed,
        "sinks": x.sinks is not None,
        "segment_ids": x.q_segments is not None,
        "offsets": x.shift is not None,
        "tiles": x.tile_indices is not None,
        "dropout_rate": config.dropout,
    }
    missing += [name for name, here in given.items() if here]
    if x.q.shape[-1] > 128 or x.v.shape[-1] != x.q.shape[-1]:
        missing.append("head dims above 128 or a value dim of its own")
    return missing
