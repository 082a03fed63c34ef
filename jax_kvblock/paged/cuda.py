"""The CUDA kernels of `paged_attention`: what they serve, and the launcher's call.

`run` describes the call to the FFI handler in `cpp/ops/attention/paged_ffi.cc`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.config import AttentionConfig, Operands
from jax_kvblock.attention.cuda import MOST_DIM_OF_8_BITS, unserved_by_gpu
from jax_kvblock.attention.cuda import unserved as unserved_scores
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.core import ffi
from jax_kvblock.paged.call import (
    Paged,
    PagedConfig,
    dtype_of,
    page_shapes,
    value_dim_of,
)
from jax_kvblock.paged.heads import HeadPart, attend_all_heads
from jax_kvblock.paged.narrow import may_be_many
from jax_kvblock.paged.pages import Pages

TARGET = "kvblock_paged_attention"  # of XLA's FFI
MOST_ARRAYS = 128  # KVBLOCK_PAGED_MAX_ARRAYS
MOST_STRIDE = 16 * (2**32 - 1)
ALIGNED = 16  # bytes that keys and values are read by
CACHES = tuple(map(np.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)))
# Head dims beyond it need more shared memory than consumer GPUs have.
LARGE_SHARED = 192
# Of latent caches: head dim and value dim (generic/latent/instances.h).
LATENT_DIMS = ((576, 512), (192, 128))


class _Rows(NamedTuple):
    """Where keys, or values, lie in their array, in bytes."""

    offset: int
    block: int
    token: int
    head: int


class _Cache(NamedTuple):
    """A cache as the kernels read it.

    Attributes:
      arrays: one, one for each layer, or, with `pair`, keys and values.
      layers, layer_stride: of an array with several layers, of which an operand
        chooses.
    """

    arrays: tuple[Any, ...]
    pair: bool
    layers: int
    layer_stride: int
    k: _Rows
    v: _Rows
    dense: bool  # a head's elements are neighbours


def unserved(config: PagedConfig, x: Paged) -> list[str]:
    """What of a call the kernels do not serve; empty when they serve it."""
    value_dim, latent = value_dim_of(config, x), config.value_dim is not None
    dims, missing = (x.q.shape[-1], value_dim), []
    if latent:
        if dims not in LATENT_DIMS:
            missing.append(
                f"a latent cache of head dim {dims[0]} with value_dim {dims[1]} "
                f"({', '.join(f'{d} with {v}' for d, v in LATENT_DIMS)} are served)"
            )
        dims = (64, 64)  # the rest is as with any
    # Scores, dims and dtypes as those of dense attention of a query, in 16 bits.
    q, v = (jax.ShapeDtypeStruct((1, 1, x.q.shape[2], d), x.q.dtype) for d in dims)
    scores = config.scores, Operands(q, q, v)
    missing += unserved_scores(*scores, implementation="cuda_sm90", backward=False)
    missing += unserved_by_gpu("cuda", False)
    cache = _cache(config, x.pages)
    if len(cache.arrays) - cache.pair > MOST_ARRAYS:
        missing.append(
            f"a traced layer of a pool of {len(cache.arrays)} arrays (up to "
            f"{MOST_ARRAYS} are served)"
        )
    if not cache.dense:
        missing.append("a layout whose last axis is not D")
    strides = (*cache.k, *cache.v, cache.layer_stride)
    if any(stride % ALIGNED for stride in strides):
        missing.append(f"rows that do not begin at multiples of {ALIGNED} bytes")
    if max(strides[1:4] + strides[5:8]) > MOST_STRIDE:
        missing.append("strides of more than 64 GiB")
    if x.scales is not None:
        missing.append("a scale of each key")
    if (stored := dtype_of(x.pages)) != x.q.dtype:
        if latent:
            missing.append(f"a latent cache of {stored} with q {x.q.dtype}")
        elif stored not in CACHES:
            missing.append(f"a cache of {stored} with q {x.q.dtype}")
        elif x.q.shape[-1] % ALIGNED or value_dim % ALIGNED:
            missing.append(
                f"head dims of a cache of {stored} that no {ALIGNED} divides"
            )
    if config.quantize_queries and may_be_many(config, x):
        missing += _unserved_in_8_bits(config, x, value_dim)
    dim = max(x.q.shape[-1], value_dim)
    small = [c for c in ffi.gpu_capabilities() if c in ((8, 6), (8, 9)) or c[0] == 12]
    if dim > LARGE_SHARED and small:
        missing.append(f"head dims beyond {LARGE_SHARED} on this GPU")
    return missing


def _unserved_in_8_bits(config: PagedConfig, x: Paged, value_dim: int) -> list[str]:
    """What of queries that are rounded; mirrors CheckNarrow in paged_check.cc."""
    missing = []
    if x.q.dtype != jnp.bfloat16:
        missing.append(f"q {x.q.dtype} with quantize_queries (bfloat16 is served)")
    if max(x.q.shape[-1], value_dim) > MOST_DIM_OF_8_BITS:
        missing.append(f"head dims beyond {MOST_DIM_OF_8_BITS} with quantize_queries")
    if config.scores.scale <= 0:
        missing.append("a scale that is not above 0 with quantize_queries")
    if config.scores.softcap > 0:
        missing.append("softcap with quantize_queries")
    return missing + unserved_by_gpu("cuda_sm90", False)


def run(config: PagedConfig, x: Paged, part: HeadPart | None = None) -> tuple[Any, Any]:
    """out `[C, R, N, Dv]` and lse `[C, R, N]`, by the CUDA launcher."""
    blocks, size, kv_heads, _ = page_shapes(x.pages)[0]
    value_dim = value_dim_of(config, x)
    cache = _cache(config, x.pages)
    if part is not None:
        made = _of_heads(config, x, cache, part)
        if made is None:
            return attend_all_heads(run, config, x, part)
        (x, cache), kv_heads = made, part.heads
    optional = [x.query_start, x.q_lens, x.layer, x.sinks, x.ranges, x.tree_mask]
    optional += [x.k_scale, x.v_scale, x.table_first]
    present = sum(1 << i for i, a in enumerate(optional) if a is not None)
    calls, rows, heads, _ = x.q.shape
    narrow = dtype_of(x.pages) != x.q.dtype
    room = ffi.paged_attention_workspace(
        calls,
        x.sequences,
        rows,
        heads,
        kv_heads,
        value_dim,
        narrow,
        config.split_size,
        x.tables.shape[-1],
        size,
        x.q.shape[3],
        config.quantize_queries,
    )
    call = jax.ffi.ffi_call(
        TARGET,
        [
            jax.ShapeDtypeStruct((calls, rows, heads, value_dim), x.q.dtype),
            jax.ShapeDtypeStruct((calls, rows, heads), jnp.float32),
            jax.ShapeDtypeStruct((room,), jnp.uint8),
        ],
    )
    scores: AttentionConfig = config.scores
    numbers = {
        "present": present,
        "pair": cache.pair,
        "num_kv_heads": kv_heads,
        "value_dim": value_dim,
        "num_blocks": blocks,
        "block_size": size,
        "num_layers": cache.layers,
        "window_left": min(scores.window_left, 2**31 - 1),
        "window_right": min(scores.window_right, 2**31 - 1),
        "layer_stride": cache.layer_stride,
        "scale_layer": config.layer or 0,
        "split_size": config.split_size,
        "values_in_keys": config.value_dim is not None,
        "narrow_queries": config.quantize_queries,
        **{f"k_{name}": n for name, n in cache.k._asdict().items()},
        **{f"v_{name}": n for name, n in cache.v._asdict().items()},
    }
    given = [a for a in optional if a is not None]
    out, lse, _ = call(
        x.q,
        x.tables,
        x.kv_lens,
        *given,
        *cache.arrays,
        **{name: np.int64(n) for name, n in numbers.items()},
        scale=np.float32(scores.scale),
        softcap=np.float32(scores.softcap),
    )
    return out, lse


def _cache(config: PagedConfig, pages: KVPool | Pages) -> _Cache:
    if isinstance(pages, Pages):
        size = pages.arrays[0].dtype.itemsize
        shapes = [a.shape for a in pages.arrays]
        k, v = (
            _Rows(s.offset, s.page, s.token, s.head)
            for s in pages.layout.strides("paged_attention", shapes, size)
        )
        return _Cache(pages.arrays, len(shapes) == 2, 1, 0, k, v, True)
    return _pool(config, pages)


def _pool(config: PagedConfig, pool: KVPool) -> _Cache:
    spec, arrays = pool.spec, pool.arrays
    axes = [axis for group in spec.block_layout.groups for axis in group]
    sizes = dict(spec.sizes)
    if not pool.contiguous:  # layers come first
        axes.remove("L")
    step, stride = spec.dtype.itemsize, {"L": 0}
    for axis in reversed(axes):
        stride[axis] = step
        step *= sizes[axis]
    layers, first = spec.num_layers, 0
    if config.layer is not None:
        layers, first = 1, config.layer * stride["L"]
        if not pool.contiguous:
            arrays = (arrays[config.layer],)
    k, v = (
        _Rows(first + outer * stride["O"], step, stride["T"], stride["H"])
        for outer in (0, spec.num_outer - 1)  # of a latent cache, keys twice
    )
    dense = axes[-1] == "D"
    return _Cache(tuple(arrays), False, layers, stride["L"], k, v, dense)


# ---- some of the heads ---------------------------------------------------------------


def _of_heads(
    config: PagedConfig, x: Paged, cache: _Cache, part: HeadPart
) -> tuple[Paged, _Cache] | None:
    """The call and the cache as if it had these key heads alone; None if it cannot be.

    The kernels begin `layer` strides behind an address, and the layer is an operand.
    Where it counts in heads it moves the first head, too: key head h of layer l is at
    l · layer_stride + h · head_stride, which is a multiple of the lesser of both where
    that divides the other.
    """
    kv_heads, head = page_shapes(x.pages)[0][2], cache.k.head
    if cache.v.head != head or len(cache.arrays) - cache.pair > 1:
        return None
    if x.layer is not None and x.layer.shape[0] > 1 and _by_layer(x):
        return None
    more = kv_heads - part.heads  # where the first of them may be, at most
    step = {"layer": 0, "head": 1}  # in units of the lesser stride
    unit = head
    if cache.layers > 1:
        unit = min(head, cache.layer_stride)
        if head % unit or cache.layer_stride % unit:
            return None
        step = {"layer": cache.layer_stride // unit, "head": head // unit}
    places = (cache.layers - 1) * step["layer"] + more * step["head"] + 1
    if places > 2**31 - 1:
        return None
    at = (part.first * step["head"])[None]
    if x.layer is not None:
        there = (x.layer >= 0) & (x.layer < cache.layers)
        at = jnp.where(there, x.layer * step["layer"] + at, -1)
    k_scale, v_scale = (_scale(config, x, a, part) for a in (x.k_scale, x.v_scale))
    x = x._replace(layer=at, k_scale=k_scale, v_scale=v_scale)
    return x, cache._replace(layers=places, layer_stride=unit)


def _by_layer(x: Paged) -> bool:
    """Whether there are factors of all layers."""
    return any(a is not None and a.ndim == 4 for a in (x.k_scale, x.v_scale))


def _scale(config: PagedConfig, x: Paged, scale: Any, part: HeadPart) -> Any:
    """Of these heads, and of one layer: `[1]`, or their number instead of K."""
    if scale is None or scale.shape == (1,):
        return scale
    if scale.ndim == 4:
        layer = config.layer if x.layer is None else x.layer[0]
        scale = jax.lax.dynamic_index_in_dim(scale, layer, 0, keepdims=False)
    return part.of(scale, scale.ndim - 1)
