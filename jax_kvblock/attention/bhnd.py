"""Attention on `[B, H, N, D]` with the tile's size in the caller's hands.

Forward, backward and their bookkeeping as separate calls, for code that keeps a row's
sum l and maximum m instead of its log-sum-exp: `m + log(l) = lse`, and every pair with
the same lse means the same.

Which tiles there are is in `tile_sizes`, what they take of memory in `memory_estimate`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp

from jax_kvblock.attention import arguments, flash, primitive
from jax_kvblock.attention.config import AttentionConfig, Operands, accumulator
from jax_kvblock.attention.ops import LogSumExp
from jax_kvblock.attention.precision import of_products
from jax_kvblock.attention.qkv import BHND, FLOATS, check_qkv
from jax_kvblock.attention.tile_sizes import TILE_FIX, find_tile
from jax_kvblock.core.checks import check_array, check_integer, show, to_jax
from jax_kvblock.core.types import ArrayIn

if TYPE_CHECKING:
    from jaxtyping import Float

Output: TypeAlias = 'Float[jax.Array, "B H N D"]'
Rows: TypeAlias = 'Float[jax.Array, "B H N"]'
Residuals: TypeAlias = "tuple[Output, Rows, Rows]"
Keys: TypeAlias = 'Float[jax.Array, "B H S D"]'
Gradients: TypeAlias = "tuple[Output, Keys, Keys]"


@overload
def flash_attention_forward(
    Q: Float[ArrayIn, "B H N D"],
    K: Float[ArrayIn, "B H S D"],
    V: Float[ArrayIn, "B H S D"],
    Bc: int = ...,
    Br: int = ...,
    use_half: bool = ...,
    *,
    return_residuals: Literal[False] = ...,
) -> Output: ...
@overload
def flash_attention_forward(
    Q: Float[ArrayIn, "B H N D"],
    K: Float[ArrayIn, "B H S D"],
    V: Float[ArrayIn, "B H S D"],
    Bc: int = ...,
    Br: int = ...,
    use_half: bool = ...,
    *,
    return_residuals: Literal[True],
) -> Residuals: ...
@overload
def flash_attention_forward(
    Q: Float[ArrayIn, "B H N D"],
    K: Float[ArrayIn, "B H S D"],
    V: Float[ArrayIn, "B H S D"],
    Bc: int = ...,
    Br: int = ...,
    use_half: bool = ...,
    *,
    return_residuals: bool,
) -> Output | Residuals: ...
def flash_attention_forward(
    Q: Float[ArrayIn, "B H N D"],
    K: Float[ArrayIn, "B H S D"],
    V: Float[ArrayIn, "B H S D"],
    Bc: int = 32,
    Br: int = 32,
    use_half: bool = False,
    *,
    return_residuals: bool = False,
) -> Output | Residuals:
    """Attention of every query to every key, scaled by `1 / sqrt(D)`.

    Args:
      Q: `[B, H, N, D]`, float32, float16 or bfloat16; D a multiple of 8 up to 256.
      K, V: like Q; their N may differ.
      Bc, Br: keys and queries of a tile, see `available_tiles`. The default, 32 x 32,
        asks for the best kernels that serve the call, in their own tile, and for "xla"
        in such blocks elsewhere.
      use_half: computes in float16; results come back in Q's dtype.
      return_residuals: also return what the backward pass wants.

    Returns:
      O `[B, H, N, D]` in Q's dtype; with `return_residuals` the tuple (O, l, m), l and
      m float32 `[B, H, N]`: m the rows' maxima of the scaled scores, l the rows' sums
      of exp(score - m). The kernels keep lse alone, so m costs a product Q K^T of its
      own; `flash_attention(return_lse=True)` and `lse_to_lm` do without.

    Raises:
      ValueError: shapes do not fit, or the tile is not one of those that it lists.
      TypeError: dtypes do not fit, Bc or Br is no integer, or a flag no bool.

    Example:
      >>> Q, K, V = jax.random.normal(jax.random.key(0), (3, 4, 8, 512, 64))
      >>> flash_attention_forward(Q, K, V, Bc=64, Br=32).shape
      (4, 8, 512, 64)

    Source: Dao et al., FlashAttention (arXiv:2205.14135), algorithm 1.
    """
    where = "flash_attention_forward"
    arguments.check_flags(where, return_residuals=return_residuals)
    Q, K, V = map(to_jax, check_qkv(where, BHND, Q, K, V))
    config, x = _call(where, Q, K, V, Bc, Br, use_half)
    if not return_residuals:
        return jnp.swapaxes(flash.output(config, x), 1, 2).astype(Q.dtype)
    o, lse = flash.attention(config, x)
    o = jnp.swapaxes(o, 1, 2).astype(Q.dtype)
    br, bc = config.xla_block_q, config.xla_block_kv
    l, m = lse_to_lm(lse, _row_maxima(config, x, br, bc))
    return o, l, m


def flash_attention_backward(
    Q: Float[ArrayIn, "B H N D"],
    K: Float[ArrayIn, "B H S D"],
    V: Float[ArrayIn, "B H S D"],
    O: Float[ArrayIn, "B H N D"],
    dO: Float[ArrayIn, "B H N D"],
    l: Float[ArrayIn, "B H N"],
    m: Float[ArrayIn, "B H N"],
    Bc: int = 32,
    Br: int = 32,
    use_half: bool = False,
) -> Gradients:
    """The gradients of `flash_attention_forward`.

    Args:
      Q, K, V, Bc, Br, use_half: as in the forward pass.
      O: its output.
      dO: the gradient with respect to O, floats too.
      l, m: float32 `[B, H, N]`, any pair with `m + log(l)` = lse: what the forward pass
        returned, or `lse_to_lm(lse)`.

    Returns:
      (dQ, dK, dV) in the dtypes of Q, K, V. They have derivatives once, with respect to
      O, dO, l and m as well.

    Raises:
      TypeError, ValueError: as in the forward pass.

    Example:
      >>> O, l, m = flash_attention_forward(Q, K, V, return_residuals=True)
      >>> dQ, dK, dV = flash_attention_backward(Q, K, V, O, jnp.ones_like(O), l, m)
    """
    where = "flash_attention_backward"
    Q, K, V = map(to_jax, check_qkv(where, BHND, Q, K, V))
    config, x = _call(where, Q, K, V, Bc, Br, use_half)
    dtype = Q.dtype
    outputs = {
        name: _check_shape(where, name, a, "Q", Q.shape)
        for name, a in {"O": O, "dO": dO}.items()
    }
    for name, a in outputs.items():
        if a.dtype not in FLOATS:
            raise TypeError(
                f"{where}: {name} must be floats like Q, got {show(a)}; cast it with "
                ".astype(Q.dtype)"
            )
    rows = {
        name: _check_shape(where, name, a, "Q, [B, H, N],", Q.shape[:-1])
        for name, a in {"l": l, "m": m}.items()
    }
    wide = accumulator(dtype)
    for name, a in rows.items():
        if jax.dtypes.canonicalize_dtype(a.dtype) != wide:
            raise TypeError(
                f"{where}: {name} must be {wide}, got {show(a)}; pass what "
                "flash_attention_forward(return_residuals=True) returned"
            )
    lse = lm_to_lse(**rows)
    o, d_o = map(to_jax, outputs.values())
    delta = jnp.sum(d_o.astype(lse.dtype) * o.astype(lse.dtype), axis=-1)
    d_o = jnp.swapaxes(d_o, 1, 2).astype(x.q.dtype)
    gradients = primitive.backward(config, x, LogSumExp(lse), delta, d_o)
    dq, dk, dv = (jnp.swapaxes(a, 1, 2).astype(dtype) for a in gradients)
    return dq, dk, dv


@dataclasses.dataclass(frozen=True)
class FlashAttention:
    """Attention with a fixed tile: a function to call, with its own backward pass.

    It has no parameters and is hashable: keep it in a flax module, or close over it.
    `jax.grad` through a call takes the same backward pass as `backward`.

    Args:
      bc, br: keys and queries of a tile.
      use_half: computes in float16.

    Raises:
      TypeError: bc or br is no integer, or use_half no bool. Whether there is such a
        tile depends on the head dim, so a call says that.

    Example:
      >>> attention = FlashAttention(bc=64, br=32, use_half=True)
      >>> output = attention(Q, K, V)
    """

    bc: int = 32
    br: int = 32
    use_half: bool = False

    def __post_init__(self) -> None:
        where = type(self).__name__
        for name in ("bc", "br"):
            size = check_integer(where, name, getattr(self, name), TILE_FIX)
            object.__setattr__(self, name, size)
        arguments.check_flags(where, use_half=self.use_half)

    def __call__(
        self,
        Q: Float[ArrayIn, "B H N D"],
        K: Float[ArrayIn, "B H S D"],
        V: Float[ArrayIn, "B H S D"],
    ) -> Output:
        """The output: `forward`."""
        return self.forward(Q, K, V)

    @overload
    def forward(
        self,
        Q: Float[ArrayIn, "B H N D"],
        K: Float[ArrayIn, "B H S D"],
        V: Float[ArrayIn, "B H S D"],
        *,
        return_residuals: Literal[False] = ...,
    ) -> Output: ...
    @overload
    def forward(
        self,
        Q: Float[ArrayIn, "B H N D"],
        K: Float[ArrayIn, "B H S D"],
        V: Float[ArrayIn, "B H S D"],
        *,
        return_residuals: Literal[True],
    ) -> Residuals: ...
    @overload
    def forward(
        self,
        Q: Float[ArrayIn, "B H N D"],
        K: Float[ArrayIn, "B H S D"],
        V: Float[ArrayIn, "B H S D"],
        *,
        return_residuals: bool,
    ) -> Output | Residuals: ...
    def forward(
        self,
        Q: Float[ArrayIn, "B H N D"],
        K: Float[ArrayIn, "B H S D"],
        V: Float[ArrayIn, "B H S D"],
        *,
        return_residuals: bool = False,
    ) -> Output | Residuals:
        """`flash_attention_forward` with this tile."""
        return flash_attention_forward(
            Q,
            K,
            V,
            self.bc,
            self.br,
            self.use_half,
            return_residuals=return_residuals,
        )

    def backward(
        self,
        Q: Float[ArrayIn, "B H N D"],
        K: Float[ArrayIn, "B H S D"],
        V: Float[ArrayIn, "B H S D"],
        O: Float[ArrayIn, "B H N D"],
        dO: Float[ArrayIn, "B H N D"],
        l: Float[ArrayIn, "B H N"],
        m: Float[ArrayIn, "B H N"],
    ) -> Gradients:
        """`flash_attention_backward` with this tile."""
        return flash_attention_backward(
            Q, K, V, O, dO, l, m, self.bc, self.br, self.use_half
        )


# ---- l, m and lse --------------------------------------------------------------------


def lm_to_lse(
    l: Float[ArrayIn, "*rows"], m: Float[ArrayIn, "*rows"]
) -> Float[jax.Array, "*rows"]:
    """`m + log(l)`, the log-sum-exp of rows with sums l and maxima m.

    −inf where l is 0: a row without keys.

    Raises:
      TypeError, ValueError: l and m are not arrays of floats in one shape.
    """
    where = "lm_to_lse"
    l = _check_rows(where, "l", l)
    m = _check_rows(where, "m", m, "l", l)
    return _lm_to_lse(l, m)


# One program each, also when called outside of jit: no −inf of a step between is a
# result that jax_debug_infs looks at.
_one_program = functools.partial(jax.jit, inline=True)


@_one_program
def _lm_to_lse(l: jax.Array, m: jax.Array) -> jax.Array:
    empty = l == 0
    return jnp.where(empty, -jnp.inf, m + jnp.log(jnp.where(empty, 1, l)))


def lse_to_lm(
    lse: Float[ArrayIn, "*rows"], m: Float[ArrayIn, "*rows"] | None = None
) -> tuple[Float[jax.Array, "*rows"], Float[jax.Array, "*rows"]]:
    """(l, m) with `m + log(l)` = lse.

    Args:
      lse: the rows' log-sum-exp, −inf for rows without keys.
      m: the rows' maxima; where they are not known, lse itself serves, with l = 1.

    Returns:
      l, shaped like lse and 0 for rows without keys, and m.

    Raises:
      TypeError, ValueError: lse and m are not arrays of floats in one shape.
    """
    where = "lse_to_lm"
    lse = _check_rows(where, "lse", lse)
    if m is not None:
        m = _check_rows(where, "m", m, "lse", lse)
    return _lse_to_lm(lse, m)


@_one_program
def _lse_to_lm(lse: jax.Array, m: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    empty = jnp.isneginf(lse)
    if m is None:
        m = lse
    l = jnp.where(empty, 0, jnp.exp(lse - jnp.where(empty, 0, m)))
    return l.astype(lse.dtype), jnp.where(empty, -jnp.inf, m).astype(lse.dtype)


def _check_rows(
    where: str, name: str, a: Any, other: str = "", like: Any = None
) -> jax.Array:
    a = check_array(where, name, a)
    if a.dtype not in FLOATS:
        raise TypeError(
            f"{where}: {name} must be floats, got {show(a)}; cast it with "
            ".astype(jnp.float32)"
        )
    if like is not None and a.shape != like.shape:
        raise ValueError(
            f"{where}: {name} must be shaped like {other}, {list(like.shape)}, got "
            f"{show(a)}; both have a value for each row"
        )
    return to_jax(a)


@functools.partial(_one_program, static_argnames=("config", "br", "bc"))
def _row_maxima(config: AttentionConfig, x: Operands, br: int, bc: int) -> jax.Array:
    """The largest scaled score of each row, `[B, H, N]`, block by block."""
    q, k = jnp.swapaxes(x.q, 1, 2), jnp.swapaxes(x.k, 1, 2)
    rows, keys = _in_blocks(q, br), _in_blocks(k, bc)  # the last row again and again

    def block(q: jax.Array) -> jax.Array:
        def step(top: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
            scores = config.scale * jnp.einsum(
                "bhtd,bhsd->bhts",
                q,
                k,
                precision=of_products(config.precision),
                preferred_element_type=accumulator(q.dtype),
            )
            return jnp.maximum(top, scores.max(-1)), None

        # Like a block of queries, so that it varies over the same mesh axes.
        start = jnp.full_like(q[..., 0], -jnp.inf, dtype=accumulator(q.dtype))
        return jax.lax.scan(step, start, keys)[0]

    top = jnp.moveaxis(jax.lax.map(block, rows), 0, 2)
    b, h, blocks, size = top.shape
    return top.reshape(b, h, blocks * size)[..., : q.shape[2]]


def _in_blocks(a: jax.Array, size: int) -> jax.Array:
    """`[B, H, N, D]` as `[blocks, B, H, size, D]`, filled up with the last row."""
    b, h, n, d = a.shape
    missing = -n % size
    if missing:
        last = jax.lax.slice_in_dim(a, n - 1, n, axis=2)
        a = jnp.concatenate([a, *[last] * missing], axis=2)
    return jnp.moveaxis(a.reshape(b, h, (n + missing) // size, size, d), 2, 0)


# ---- arguments -----------------------------------------------------------------------


def _call(
    where: str,
    Q: jax.Array,
    K: jax.Array,
    V: jax.Array,
    Bc: Any,
    Br: Any,
    use_half: Any,
) -> tuple[AttentionConfig, Operands]:
    """The call on `[B, N, H, D]`."""
    arguments.check_flags(where, use_half=use_half)
    dtype = jnp.float16 if use_half else Q.dtype
    bc, br, implementation = find_tile(where, Bc, Br, Q.shape[-1], dtype)
    q, k, v = (jnp.swapaxes(a, 1, 2).astype(dtype) for a in (Q, K, V))
    config, x = arguments.normalize(where, q, k, v)
    config = dataclasses.replace(config, xla_block_q=br, xla_block_kv=bc)
    if implementation == "xla":
        return dataclasses.replace(config, implementation="xla"), x
    return dataclasses.replace(config, kernels=implementation), x


def _check_shape(where: str, name: str, a: Any, like: str, shape: Any) -> Any:
    a = check_array(where, name, a)
    if a.shape != shape:
        raise ValueError(
            f"{where}: {name} must be shaped like {like} {list(shape)}, got {show(a)}; "
            "pass what flash_attention_forward(return_residuals=True) returned"
        )
    return a
