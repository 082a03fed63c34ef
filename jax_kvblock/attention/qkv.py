"""The one check of queries, keys and values, in the words of whoever was called."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jax_kvblock.attention.cuda import MAX_HEAD_DIM
from jax_kvblock.core.checks import check_array, check_static, show

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
# With scales, where a signature says so: queries and keys, and the values beside them.
NARROW = (jnp.float8_e4m3fn, jnp.int8)
NARROW_VALUES = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Signature:
    """How a function calls its three arrays, and what they may be.

    Attributes:
      names: of the arrays.
      forms: for each rank that the queries may have, the dims of the three arrays.
      fixes: what to do about another rank, by that rank; None for any other.
      alike: whether keys and values have the queries' heads, which are the second axis
        then, and their head dim, which the tile decides about.
      multiple: what a head dim is a multiple of, where they are not alike.
      narrow: whether they may be in 8 bits.
    """

    names: tuple[str, str, str]
    forms: dict[int, tuple[str, str, str]]
    fixes: dict[int | None, str]
    alike: bool = False
    multiple: int = 8
    narrow: bool = False


_UNDER_VMAP = "under vmap, an axis of the batch is gone already"
_BATCHED = ("[B, T, N, D]", "[B, S, K, D]", "[B, S, K, Dv]")

BATCHED = Signature(
    ("q", "k", "v"),
    {4: _BATCHED},
    {
        3: "add a batch axis, x[None], or pass cu_seqlens for packed inputs",
        None: _UNDER_VMAP,
    },
)
ALSO_NARROW = dataclasses.replace(BATCHED, narrow=True)
PACKED = Signature(
    ("q", "k", "v"),
    {3: ("[total, N, D]", "[total, K, D]", "[total, K, Dv]")},
    {None: "flatten batch and sequence, x.reshape(-1, *x.shape[2:])"},
)
# jax.nn's; dims that are no multiple of 8 are padded.
DROP_IN = Signature(
    ("query", "key", "value"),
    {
        4: ("[B, T, N, H]", "[B, S, K, H]", "[B, S, K, Hv]"),
        3: ("[T, N, H]", "[S, K, H]", "[S, K, Hv]"),
    },
    {None: "fold further batch dims into B, or vmap"},
    multiple=1,
)
BHND = Signature(
    ("Q", "K", "V"),
    {4: ("[B, H, N, D]",) * 3},
    {None: "add axes with x[None], or fold them into B"},
    alike=True,
)


def check_qkv(
    where: str, signature: Signature, q: Any, k: Any, v: Any
) -> tuple[Any, Any, Any]:
    """The three arrays, which fit together."""
    names = signature.names
    given = zip(names, (q, k, v), strict=True)
    arrays = {name: check_array(where, name, x) for name, x in given}
    for i, name in enumerate(names):
        _check_rank(where, signature, arrays, i)
        _check_dtype(where, signature, arrays, name)
        check_static(where, name, arrays[name], first=int(arrays[name].ndim == 4))
    if signature.alike:
        _check_alike(where, arrays)
    else:
        _check_heads(where, signature, arrays)
    q, k, v = arrays.values()
    return q, k, v


def _check_rank(
    where: str, signature: Signature, arrays: dict[str, Any], i: int
) -> None:
    name, first = signature.names[i], signature.names[0]
    x, q = arrays[name], arrays[first]
    if x.ndim not in signature.forms:
        form = " or ".join(form[i] for form in signature.forms.values())
        fix = signature.fixes.get(x.ndim, signature.fixes[None])
        raise ValueError(f"{where}: {name} must be {form}, got {show(x)}; {fix}")
    if x.ndim != q.ndim:
        raise ValueError(
            f"{where}: {name} must have {first}'s rank, got {show(x)} beside "
            f"{show(q)}; add or remove the batch axis of all three"
        )


def _check_dtype(
    where: str, signature: Signature, arrays: dict[str, Any], name: str
) -> None:
    x, (first, q) = arrays[name], next(iter(arrays.items()))
    narrow = signature.narrow and q.dtype in NARROW
    if narrow and name == signature.names[2]:
        if x.dtype != NARROW_VALUES:
            raise TypeError(
                f"{where}: {name} must be float8_e4m3fn beside {first} in {q.dtype}, "
                f"got {show(x)}; jax_kvblock.fp8.quantize_qkv makes all three"
            )
        return
    if signature.narrow and x.dtype in NARROW and not narrow:
        raise TypeError(
            f"{where}: {name} is in 8 bits, {show(x)}, and {first} is not, {show(q)}; "
            "jax_kvblock.fp8.quantize_qkv makes all three"
        )
    if x.dtype not in FLOATS and not (narrow and x.dtype in NARROW):
        raise TypeError(
            f"{where}: {name} must be bfloat16, float16 or float32, got {show(x)}; "
            "cast it with .astype(jnp.bfloat16)"
        )
    if x.dtype != q.dtype and narrow:
        raise TypeError(
            f"{where}: {name} must have {first}'s dtype, {q.dtype}, got {show(x)}; "
            "jax_kvblock.fp8.quantize_qkv makes all three"
        )
    if x.dtype != q.dtype:
        raise TypeError(
            f"{where}: {name} must have {first}'s dtype, {q.dtype}, got {show(x)}; "
            f"cast it with .astype({first}.dtype)"
        )


def _check_alike(where: str, arrays: dict[str, Any]) -> None:
    """`[B, H, N, D]` of all three; N alone may differ."""
    (q_name, q), (k_name, k), (v_name, v) = arrays.items()
    if k.shape != (*q.shape[:2], k.shape[2], q.shape[3]) or v.shape != k.shape:
        raise ValueError(
            f"{where}: {k_name} and {v_name} must be [B, H, N, D] with {q_name}'s B, H "
            f"and D, got {show(k)} and {show(v)} beside {show(q)}; flash_attention "
            "serves fewer KV heads and a value dim of its own"
        )
    if not q.shape[1]:
        raise ValueError(
            f"{where}: H must be at least 1, got {show(q)}; leave the call out"
        )


def _check_heads(where: str, signature: Signature, arrays: dict[str, Any]) -> None:
    """Lengths, heads and head dims at the end; what is before them is the batch."""
    (q_name, q), (k_name, k), (v_name, v) = arrays.items()
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{where}: {k_name} must have {q_name}'s head dim, {q.shape[-1]}, got "
            f"{show(k)}; only {v_name}'s may differ"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"{where}: {v_name} must have {k_name}'s shape but for its last dim, got "
            f"{show(v)} beside {show(k)}"
        )
    if k.shape[:-3] != q.shape[:-3]:
        raise ValueError(
            f"{where}: {k_name} and {v_name} must have {q_name}'s batch, {q.shape[0]}, "
            f"got {show(k)}; repeat them, or vmap with in_axes=None for what is shared"
        )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if not kv_heads or heads % kv_heads or not heads:
        raise ValueError(
            f"{where}: {q_name}'s heads must be a positive multiple of {k_name}'s, got "
            f"{heads} and {kv_heads}; every key head serves N // K query heads"
        )
    for name, x in ((f"{q_name} and {k_name}", q), (v_name, v)):
        _check_head_dim(where, name, x.shape[-1], signature.multiple)


def _check_head_dim(where: str, name: str, dim: int, multiple: int) -> None:
    if dim % multiple == 0 and multiple <= dim <= MAX_HEAD_DIM:
        return
    must = f"a multiple of {multiple} from {multiple}" if multiple > 1 else "from 1"
    if dim > MAX_HEAD_DIM:
        fix = "jax.nn.dot_product_attention has no such limit"
    elif multiple > 1:
        fix = (
            "pad it with zeros (and pass scale=, which is taken from the padded one "
            "otherwise)"
        )
    else:
        fix = "leave the call out"
    raise ValueError(
        f"{where}: the head dim of {name} must be {must} to {MAX_HEAD_DIM}, got {dim}; "
        f"{fix}"
    )
