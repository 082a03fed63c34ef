"""Layout conversions of blocks that are arrays: stacked, or lists of pieces.

Every function here is a thin name over one strided block copy. All are linear, batch
over any leading axes and under `jax.vmap`, and run on the CPU and on CUDA; elsewhere
XLA computes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import jax

from jax_kvblock.blocks.copy import block_copy
from jax_kvblock.blocks.implementations import check_implementation, check_operational
from jax_kvblock.blocks.layout import (
    HND,
    NHD,
    UNIVERSAL,
    BlockSpec,
    Layout,
    check_spec,
    find_layout,
)
from jax_kvblock.blocks.match import (
    check_same,
    flatten_list,
    match_array,
    match_pieces,
    spec_of_operational,
)
from jax_kvblock.blocks.plan import Copy, Form, Side
from jax_kvblock.core import checks
from jax_kvblock.core.types import ArrayIn, Blocks, Pieces

if TYPE_CHECKING:
    from jaxtyping import Shaped


@overload
def block_to_universal(
    blocks: Pieces,
    layout: str = ...,
    *,
    spec: BlockSpec | None = ...,
    num_outer: int = ...,
    implementation: str | None = ...,
) -> list[jax.Array]: ...
@overload
def block_to_universal(
    blocks: Shaped[ArrayIn, "*batch nl no nt nh hd"],
    layout: str = ...,
    *,
    spec: BlockSpec | None = ...,
    num_outer: int = ...,
    implementation: str | None = ...,
) -> Shaped[jax.Array, "*batch nh nl no nt hd"]: ...
def block_to_universal(
    blocks: Shaped[ArrayIn, "*batch nl no nt nh hd"] | Pieces,
    layout: str = "NHD",
    *,
    spec: BlockSpec | None = None,
    num_outer: int = 2,
    implementation: str | None = None,
) -> Shaped[jax.Array, "*batch nh nl no nt hd"] | list[jax.Array]:
    """Moves blocks to the universal layout, heads first.

    Args:
      blocks: an array `[..., nl, no, nt, nh, hd]` (NHD) or `[..., nl, no, nh, nt, hd]`
        (HND) with any leading batch axes; or a list of nb blocks, each a list of nl·no
        arrays `[nt, nh, hd]` or `[nh, nt, hd]`, layer by layer.
      layout: "NHD" or "HND".
      spec: what a block is, when the input should be checked against it.
      num_outer: outer pieces to a layer, for list input without a spec.
      implementation: "kernel", "xla" or None, which takes the kernel.

    Returns:
      An array `[..., nh, nl, no, nt, hd]`; a list of nb such arrays for list input.

    Raises:
      ValueError: for a wrong rank, shape or layout name.
      TypeError: for a dtype smaller than a byte, or dtypes that differ in a list.

    Example:
      >>> block_to_universal(jnp.zeros((32, 2, 16, 8, 128))).shape
      (8, 32, 2, 16, 128)
    """
    where = "block_to_universal"
    source = _inner_layout(where, layout)
    return _convert(
        where, "blocks", blocks, source, UNIVERSAL, spec, num_outer,
        check_implementation(where, implementation),
    )  # fmt: skip


@overload
def universal_to_block(
    universal: Blocks,
    layout: str = ...,
    *,
    spec: BlockSpec | None = ...,
    implementation: str | None = ...,
) -> list[list[jax.Array]]: ...
@overload
def universal_to_block(
    universal: Shaped[ArrayIn, "*batch nh nl no nt hd"],
    layout: str = ...,
    *,
    spec: BlockSpec | None = ...,
    implementation: str | None = ...,
) -> Shaped[jax.Array, "*batch nl no nt nh hd"]: ...
def universal_to_block(
    universal: Shaped[ArrayIn, "*batch nh nl no nt hd"] | Blocks,
    layout: str = "NHD",
    *,
    spec: BlockSpec | None = None,
    implementation: str | None = None,
) -> Shaped[jax.Array, "*batch nl no nt nh hd"] | list[list[jax.Array]]:
    """Moves universal blocks back to NHD or HND: the inverse of `block_to_universal`.

    Args:
      universal: an array `[..., nh, nl, no, nt, hd]`, or a list of nb arrays
        `[nh, nl, no, nt, hd]`.
      layout: "NHD" or "HND".
      spec: what a block is, when the input should be checked against it.
      implementation: "kernel", "xla" or None, which takes the kernel.

    Returns:
      An array `[..., nl, no, nt, nh, hd]` (HND: `nh, nt`); for list input a list of nb
      lists of nl·no arrays.

    Raises:
      ValueError: for a wrong rank, shape or layout name.
      TypeError: for a dtype smaller than a byte, or dtypes that differ in a list.
    """
    where = "universal_to_block"
    target = _inner_layout(where, layout)
    return _convert(
        where, "universal", universal, UNIVERSAL, target, spec, 2,
        check_implementation(where, implementation),
    )  # fmt: skip


@overload
def block_to_operational(
    blocks: Pieces,
    layout: str = ...,
    *,
    spec: BlockSpec | None = ...,
    num_outer: int = ...,
    implementation: str | None = ...,
    backend: str | None = ...,
) -> list[jax.Array]: ...
@overload
def block_to_operational(
    blocks: Shaped[ArrayIn, "*batch nl no nt nh hd"],
    layout: str = ...,
    *,
    spec: BlockSpec | None = ...,
    num_outer: int = ...,
    implementation: str | None = ...,
    backend: str | None = ...,
) -> Shaped[jax.Array, "*batch nl no inner"]: ...
def block_to_operational(
    blocks: Shaped[ArrayIn, "*batch nl no nt nh hd"] | Pieces,
    layout: str = "NHD",
    *,
    spec: BlockSpec | None = None,
    num_outer: int = 2,
    implementation: str | None = None,
    backend: str | None = None,
) -> Shaped[jax.Array, "*batch nl no inner"] | list[jax.Array]:
    """Packs the pieces of each block into one operational block.

    Args:
      blocks: as for `block_to_universal`.
      layout: the order inside a piece, "NHD" or "HND"; it is kept.
      spec: what a block is, when the input should be checked against it.
      num_outer: outer pieces to a layer, for list input without a spec.
      implementation: "kernel" (one launch for all blocks), "batch" (one
        `cudaMemcpyBatchAsync`), "async" (one `cudaMemcpyAsync` a run), "xla", or None
        for the first that serves the case; the kernel serves all. "batch" and "async"
        need CUDA and keep the surrounding jit out of CUDA graphs.
      backend: the name that others have for `implementation`, where "auto" is None.

    Returns:
      An array `[..., nl, no, nt·nh·hd]`; a list of nb such arrays for list input. For a
      stacked array inside a jit, `blocks.reshape` says the same and moves nothing.

    Raises:
      ValueError: for a wrong rank, shape, layout or implementation.
      TypeError: for a dtype smaller than a byte, dtypes that differ in a list, or both
        `implementation` and `backend`.
    """
    where = "block_to_operational"
    inner = _inner_layout(where, layout)
    target = find_layout(where, "layout", "operational", inner.name)
    return _convert(
        where, "blocks", blocks, inner, target, spec, num_outer,
        check_operational(where, implementation, backend),
    )  # fmt: skip


@overload
def operational_to_block(
    operational: Blocks,
    layout: str = ...,
    *,
    spec: BlockSpec | None = ...,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    implementation: str | None = ...,
    backend: str | None = ...,
) -> list[list[jax.Array]]: ...
@overload
def operational_to_block(
    operational: Shaped[ArrayIn, "*batch nl no inner"],
    layout: str = ...,
    *,
    spec: BlockSpec | None = ...,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    implementation: str | None = ...,
    backend: str | None = ...,
) -> Shaped[jax.Array, "*batch nl no nt nh hd"]: ...
def operational_to_block(
    operational: Shaped[ArrayIn, "*batch nl no inner"] | Blocks,
    layout: str = "NHD",
    *,
    spec: BlockSpec | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    implementation: str | None = None,
    backend: str | None = None,
) -> Shaped[jax.Array, "*batch nl no nt nh hd"] | list[list[jax.Array]]:
    """Unpacks operational blocks into pieces: the inverse of `block_to_operational`.

    Args:
      operational: an array `[..., nl, no, inner]`, or a list of nb arrays
        `[nl, no, inner]`.
      layout: the order inside a piece, "NHD" or "HND".
      spec: what a block is; or give `num_kv_heads` and `head_dim` instead.
      num_kv_heads, head_dim: with them, nt = inner / (nh · hd).
      implementation, backend: as for `block_to_operational`.

    Returns:
      An array `[..., nl, no, nt, nh, hd]` (HND: `nh, nt`); for list input a list of nb
      lists of nl·no arrays.

    Raises:
      ValueError: for a wrong rank, shape, layout or implementation, or when the inner
        extent cannot be split.
      TypeError: for a dtype smaller than a byte, dtypes that differ in a list, or both
        `implementation` and `backend`.
    """
    where = "operational_to_block"
    inner = _inner_layout(where, layout)
    source = find_layout(where, "layout", "operational", inner.name)
    chosen = check_operational(where, implementation, backend)
    if spec is None:
        spec = spec_of_operational(where, operational, layout, num_kv_heads, head_dim)
    return _convert(where, "operational", operational, source, inner, spec, 2, chosen)


@overload
def convert_blocks(
    x: Shaped[ArrayIn, "..."],
    src: str | Layout,
    dst: str | Layout,
    spec: BlockSpec,
    *,
    implementation: str | None = ...,
) -> Shaped[jax.Array, "..."]: ...
@overload
def convert_blocks(
    x: Blocks | Pieces,
    src: str | Layout,
    dst: Literal["NHD", "HND"],
    spec: BlockSpec,
    *,
    implementation: str | None = ...,
) -> list[list[jax.Array]]: ...
@overload
def convert_blocks(
    x: Blocks | Pieces,
    src: str | Layout,
    dst: Literal["operational", "universal"] | Layout,
    spec: BlockSpec,
    *,
    implementation: str | None = ...,
) -> list[jax.Array]: ...
def convert_blocks(
    x: Shaped[ArrayIn, "..."] | Blocks | Pieces,
    src: str | Layout,
    dst: str | Layout,
    spec: BlockSpec,
    *,
    implementation: str | None = None,
) -> Shaped[jax.Array, "..."] | list[jax.Array] | list[list[jax.Array]]:
    """Moves blocks from any layout to any other.

    Args:
      x: an array `[..., *src shape]`, or S1's list form: a list of nb arrays, or for
        NHD and HND a list of nb lists of nl·no arrays.
      src, dst: "NHD", "HND", "operational", "universal" or a `Layout`. The order inside
        an operational block is that of `spec.layout`.
      spec: what a block is.
      implementation: "kernel", "xla" or None, which takes the kernel.

    Returns:
      An array `[..., *dst shape]`; for list input a list of nb arrays, or of nb lists
      of pieces when dst is NHD or HND.

    Raises:
      ValueError: for a wrong rank, shape or layout name.
      TypeError: for a dtype that is not the spec's, or dtypes that differ in a list.

    Example:
      >>> hnd = convert_blocks(x, "NHD", "HND", spec)   # swaps tokens and heads
    """
    where = "convert_blocks"
    check_spec(where, spec)
    source = find_layout(where, "src", src, spec.inner)
    target = find_layout(where, "dst", dst, spec.inner)
    return _convert(
        where, "x", x, source, target, spec, spec.num_outer,
        check_implementation(where, implementation),
    )  # fmt: skip


# ---- the one conversion behind the names ---------------------------------------------


def _convert(
    where: str,
    name: str,
    x: Any,
    source: Layout,
    target: Layout,
    spec: BlockSpec | None,
    num_outer: int,
    implementation: str | None,
) -> Any:
    if spec is not None:
        check_spec(where, spec)
    if isinstance(x, (list, tuple)):
        return _convert_list(
            where, name, x, source, target, spec, num_outer, implementation
        )
    x = checks.check_array(where, name, x)
    dtype = checks.check_dtype(where, name, x.dtype)
    spec = match_array(where, name, x, source, spec, dtype)
    # Each leading axis stays an axis, so that any of them may be cut over devices.
    batch = x.shape[: x.ndim - len(source.groups)]
    leading = {f"N{i}": extent for i, extent in enumerate(batch)}
    sizes = (*leading.items(), *spec.sizes.items())
    copy = Copy(
        extents=sizes,
        src=Side(_stacked(leading, source), sizes),
        dst=Side(_stacked(leading, target), sizes),
        in_place=False,
        implementation=implementation,
    )
    (result,) = block_copy(copy, [checks.to_jax(x)])
    return result


def _convert_list(
    where: str,
    name: str,
    blocks: Sequence[Any],
    source: Layout,
    target: Layout,
    spec: BlockSpec | None,
    num_outer: int,
    implementation: str | None,
) -> list[Any]:
    if len(blocks) == 0:
        return []
    pieces_in = source in (NHD, HND) and isinstance(blocks[0], (list, tuple))
    arrays, per_block = flatten_list(where, name, blocks, pieces_in)
    dtype = check_same(where, name, arrays, per_block if pieces_in else None)
    if pieces_in:
        spec = match_pieces(
            where, name, arrays[0], per_block, source, spec, num_outer, dtype
        )
    else:
        spec = match_array(where, name, arrays[0], source, spec, dtype, batched=False)
    pieces_out = target in (NHD, HND)
    sizes = (("N", len(blocks)), *spec.sizes.items())
    copy = Copy(
        extents=sizes,
        src=Side(_pieces(source) if pieces_in else _listed(source), sizes),
        dst=Side(_pieces(target) if pieces_out else _listed(target), sizes),
        in_place=False,
        implementation=implementation,
    )
    results = block_copy(copy, [checks.to_jax(a) for a in arrays])
    if not pieces_out:
        return list(results)
    step = spec.num_layers * spec.num_outer
    return [results[i : i + step] for i in range(0, len(results), step)]


def _stacked(leading: Iterable[str], layout: Layout) -> Form:
    return Form((), (*((axis,) for axis in leading), *layout.groups))


def _listed(layout: Layout) -> Form:
    return Form(("N",), layout.groups)


def _pieces(layout: Layout) -> Form:
    return Form(("N", "L", "O"), layout.groups[2:])


# ---- checks --------------------------------------------------------------------------


def _inner_layout(where: str, layout: Any) -> Layout:
    checks.check_choice(where, "layout", layout, ("NHD", "HND"))
    return NHD if layout == "NHD" else HND
