"""`merge_attention`: one result of several, each over keys of its own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from jax_kvblock.attention.joining import merge_arrays
from jax_kvblock.attention.options import Output, Rows
from jax_kvblock.attention.qkv import FLOATS
from jax_kvblock.core.checks import check_array, plural, show, to_jax
from jax_kvblock.core.types import ArrayIn

if TYPE_CHECKING:
    from jaxtyping import Float

# What `flash_attention` gives with return_lse.
Part: TypeAlias = (
    'tuple[Float[ArrayIn, "*B T N Dv"], Float[ArrayIn, "*B T N"]] | Sequence[ArrayIn]'
)


def merge_attention(
    parts: Sequence[Part], *, axis_name: Hashable | Sequence[Hashable] | None = None
) -> tuple[Output, Rows]:
    """The attention over all keys, from parts of them.

    Each part is the pair that `flash_attention` returns with `return_lse`, over keys
    that no other part has: a prefix that sequences share and what each has of its own,
    a window and a few sinks before it, or the keys that a device holds::

        lse = log(sum_i exp(lse_i))
        out = sum_i exp(lse_i - lse) out_i

    computed in float32 (float64 for parts in float64). The order of the parts does not
    matter, but for rounding. That such parts are all that has to travel between
    devices is from Liu et al., "Ring Attention with Blockwise Transformers" (2023);
    the sum itself is the online softmax of Milakov and Gimelshein (2018).

    Args:
      parts: at least one `(out, lse)`: out `[..., T, N, Dv]` in one shape and float
        dtype for all, lse `[..., T, N]`, floats. Rows that saw no key have −inf there;
        what their out holds is never read.
      axis_name: the name, or names, of a mesh axis inside `jax.shard_map`, or of one of
        `jax.vmap`, whose members have parts of the same rows: the parts of all are
        joined, and all get the result.

    Returns:
      `(out, lse)`: out in the dtype of the parts' outs, lse in float32 (float64). Rows
      that no part saw a key for give zeros and −inf. Differentiable in both.

    Raises:
      TypeError, ValueError: there is no part, one is no pair, or shapes or dtypes do
        not fit.

    Sinks count once: pass them to one of the parts alone.

    Example:
      >>> shared = flash_attention(q, k0, v0, return_lse=True)
      >>> own = flash_attention(q, k1, v1, kv_lens=lens, return_lse=True)
      >>> out, lse = merge_attention([shared, own])
    """
    where = "merge_attention"
    pairs = [_pair(where, i, part) for i, part in enumerate(_listed(where, parts))]
    for i, (out, lse) in enumerate(pairs):
        _check_alike(where, i, out, lse, pairs[0][0])
    arrays = [(to_jax(out), to_jax(lse)) for out, lse in pairs]
    return merge_arrays(*zip(*arrays, strict=True), axis_name=_hashable(axis_name))


def _listed(where: str, parts: Any) -> list[Any]:
    parts = list(parts) if isinstance(parts, (list, tuple)) else None
    if not parts:
        got = "none" if parts == [] else "something else"
        raise ValueError(
            f"{where}: parts must be a list of (out, lse) pairs, got {got}; "
            "flash_attention(..., return_lse=True) gives one"
        )
    return parts


def _pair(where: str, i: int, part: Any) -> tuple[Any, Any]:
    if not isinstance(part, (list, tuple)) or len(part) != 2:
        listed = isinstance(part, (list, tuple))
        got = plural(len(part), "array") if listed else show(part)
        raise TypeError(
            f"{where}: parts[{i}] must be a pair (out, lse), got {got}; "
            "flash_attention(..., return_lse=True) gives one"
        )
    out = check_array(where, f"parts[{i}][0]", part[0])
    return out, check_array(where, f"parts[{i}][1]", part[1])


def _check_alike(where: str, i: int, out: Any, lse: Any, first: Any) -> None:
    for j, (name, a) in enumerate((("out", out), ("lse", lse))):
        if a.dtype not in FLOATS:
            raise TypeError(
                f"{where}: parts[{i}][{j}], {name}, must be floats, got {show(a)}; "
                "cast it with .astype(jnp.float32)"
            )
    if (out.shape, out.dtype) != (first.shape, first.dtype):
        raise ValueError(
            f"{where}: every out must be like that of parts[0], {show(first)}, got "
            f"{show(out)} in parts[{i}]; all parts are of the same queries"
        )
    if out.ndim < 1 or lse.shape != out.shape[:-1]:
        raise ValueError(
            f"{where}: parts[{i}][1], lse, must have a value for each row of out, "
            f"{list(out.shape[:-1])}, got {show(lse)}; heads are its last axis, as "
            "flash_attention returns it"
        )


def _hashable(axis_name: Any) -> Any:
    return tuple(axis_name) if isinstance(axis_name, list) else axis_name
