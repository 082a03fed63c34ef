"""`paged_attention` of jax.experimental.pallas.ops.gpu.paged_attention."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import check_array, check_int32, show, to_jax
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.dropins import arguments
from jax_kvblock.paged.attention import attend_pages
from jax_kvblock.paged.pages import PageLayout, Pages

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

LAYOUT, SCALES = PageLayout("H P T D"), PageLayout("H P T")


def paged_attention(
    q: Float[ArrayIn, "B N D"],
    k_pages: Shaped[ArrayIn, "K P page D"],
    v_pages: Shaped[ArrayIn, "K P page D"],
    block_tables: Int[ArrayIn, "B W"],
    lengths: Int[ArrayIn, " B"] | None,
    k_scales_pages: Float[ArrayIn, "K P page"] | None = None,
    v_scales_pages: Float[ArrayIn, "K P page"] | None = None,
    *,
    block_h: int = 16,
    pages_per_compute_block: int = 8,
    k_splits: int = 16,
    num_warps: int = 8,
    num_stages: int = 2,
    interpret: bool = False,
    debug: bool = False,
    mask_value: float = -0.7 * float(jnp.finfo(jnp.float32).max),
    attn_logits_soft_cap: float | None = None,
) -> Float[jax.Array, "B N D"]:
    """A query of each sequence attends to the pages of its table.

    The function of that name and these arguments in JAX's Pallas kernels for GPUs.
    Scores are q·k: who wants a softmax scale multiplies q by it.

    Args:
      q: `[B, N, D]` floats of 16 bits or more; N is a multiple of K.
      k_pages, v_pages: `[K, P, page, D]`, heads first: floats of 8 bits or more, or
        int8.
      block_tables: int32 `[B, W]`. An id that is no page is not seen (there it must be
        one).
      lengths: int32 `[B]`, the keys of each sequence; None for all of its table.
      k_scales_pages, v_scales_pages: `[K, P, page]`, a factor of each key and value;
        of both or of one.
      block_h, pages_per_compute_block, k_splits, num_warps, num_stages, interpret,
        debug, mask_value: without effect. Tables need not be a multiple of k_splits.
      attn_logits_soft_cap: scores become `cap * tanh(score / cap)`.

    Returns:
      `[B, N, D]` in q's dtype; zeros where a sequence has no keys.

    Raises:
      TypeError, ValueError: an argument's dtype, shape or value does not fit.

    Example:
      >>> out = paged_attention(q * D**-0.5, k_pages, v_pages, block_tables, lengths)
    """
    where = "dropins.pallas_gpu.paged_attention"
    del block_h, pages_per_compute_block, k_splits, num_warps, num_stages
    del interpret, debug, mask_value
    q = arguments.queries(where, "q", q, "[B, N, D]")
    pages = LAYOUT.check(where, (k_pages, v_pages))
    tables = check_int32(where, "block_tables", block_tables, "[B, W]", 2)
    if tables.shape[0] != q.shape[0]:
        raise ValueError(
            f"{where}: block_tables must be int32[{q.shape[0]}, W], a row for each of "
            f"q, got {show(tables)}"
        )
    lens = lengths
    if lens is not None:
        lens = arguments.lengths(where, "lengths", lengths, q.shape[0])
    scales = (
        _factors(where, "k_scales_pages", k_scales_pages, pages[0].shape[:3]),
        _factors(where, "v_scales_pages", v_scales_pages, pages[0].shape[:3]),
    )
    cap = arguments.soft_cap(where, "attn_logits_soft_cap", attn_logits_soft_cap)
    return _attend(cap, q, pages, tables, lens, scales)


def _factors(where: str, name: str, x: Any, shape: tuple[int, ...]) -> jax.Array | None:
    if x is None:
        return None
    x = check_array(where, name, x)
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{where}: {name} must be floats{list(shape)}, a factor of each key "
            f"(value) of the pages, got {show(x)}"
        )
    return to_jax(x)


@functools.partial(jax.jit, static_argnums=0)
def _attend(
    cap: float | None,
    q: jax.Array,
    pages: tuple[jax.Array, ...],
    tables: jax.Array,
    lens: jax.Array | None,
    scales: tuple[jax.Array | None, ...],
) -> jax.Array:
    _, _, page, _ = pages[0].shape
    if lens is None:
        lens = jnp.full(tables.shape[0], tables.shape[1] * page, jnp.int32)
    factors = None
    if any(x is not None for x in scales):
        one = jnp.ones(pages[0].shape[:3], jnp.float32)
        factors = Pages(tuple(one if x is None else x for x in scales), SCALES)
    out, _ = attend_pages(
        "dropins.pallas_gpu.paged_attention",
        q[:, None],
        Pages(pages, LAYOUT),
        tables,
        lens,
        softcap=cap,
        scale=1.0,
        scales=factors,
    )
    return out[:, 0]
