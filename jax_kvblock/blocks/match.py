"""What the arrays and lists of a conversion are: each is matched to a `BlockSpec`.

The spec that a shape means, or a given one that it has to agree with; every array of a
list like the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_kvblock.blocks.layout import BlockSpec, Layout
from jax_kvblock.core import checks


def _describe(layout: Layout) -> str:
    names = {"L": "nl", "O": "no", "T": "nt", "H": "nh", "D": "hd"}
    return ", ".join("·".join(names[a] for a in group) for group in layout.groups)


def match_array(
    where: str,
    name: str,
    x: Any,
    layout: Layout,
    spec: BlockSpec | None,
    dtype: np.dtype,
    batched: bool = True,
) -> BlockSpec:
    """The spec that x's shape means, checked against the given one."""
    rank = len(layout.groups)
    dots = "..., " if batched else ""
    if x.ndim < rank or (not batched and x.ndim != rank):
        raise ValueError(
            f"{where}: {name} must have shape [{dots}{_describe(layout)}] "
            f"({layout.name}), got {checks.show(x)}"
        )
    tail = tuple(x.shape[x.ndim - rank :])
    if spec is None:
        sizes = {g[0]: n for g, n in zip(layout.groups, tail, strict=True)}
        if min(tail) < 1:
            raise ValueError(
                f"{where}: {name} must have block extents of at least 1, got "
                f"{checks.show(x)}; only leading axes may be 0"
            )
        if sizes["O"] > 2:
            raise ValueError(
                f"{where}: {name} must have shape [{dots}{_describe(layout)}] with no "
                f"1 or 2, got {checks.show(x)} where no = {sizes['O']}"
            )
        return BlockSpec(
            sizes["L"], sizes["O"], sizes["T"], sizes["H"], sizes["D"], dtype
        )
    if tail != layout.shape(spec):
        shape = ", ".join(map(str, layout.shape(spec)))
        raise ValueError(
            f"{where}: {name} must have shape [{dots}{_describe(layout)}] = "
            f"[{dots}{shape}] ({layout.name} of the spec), got {checks.show(x)}"
        )
    _match_dtype(where, name, x, spec, checks.show(x))
    return spec


def _match_dtype(where: str, name: str, x: Any, spec: BlockSpec, got: str) -> None:
    if x.dtype != spec.dtype:
        raise TypeError(
            f"{where}: {name} must have the spec's dtype {spec.dtype}, got {got}; cast "
            "it or change the spec"
        )
    if not isinstance(x, jax.Array):
        checks.check_held(where, name, spec.dtype)


def _check_outer(where: str, name: str, value: int) -> None:
    if value not in (1, 2):
        raise ValueError(
            f"{where}: {name} must be 2 (K and V) or 1 (combined or latent), got "
            f"{value}"
        )


def match_pieces(
    where: str,
    name: str,
    piece: Any,
    per_block: int,
    layout: Layout,
    spec: BlockSpec | None,
    num_outer: int,
    dtype: np.dtype,
) -> BlockSpec:
    """`match_array` for lists of pieces: a block has `per_block`, each like `piece`."""
    groups = layout.groups[2:]
    inner = _describe(layout).split(", ", 2)[2]
    if piece.ndim != 3 or min(piece.shape) < 1:
        raise ValueError(
            f"{where}: each array in {name} must have shape [{inner}] ({layout.name}), "
            f"got {checks.show(piece)}"
        )
    if spec is None:
        _check_outer(where, "num_outer", num_outer)
        if per_block % num_outer or per_block == 0:
            raise ValueError(
                f"{where}: each block in {name} must hold nl·no arrays; {per_block} is "
                f"not a multiple of num_outer={num_outer}"
            )
        sizes = {g[0]: n for g, n in zip(groups, piece.shape, strict=True)}
        return BlockSpec(
            per_block // num_outer, num_outer, sizes["T"], sizes["H"], sizes["D"], dtype
        )
    if per_block != spec.num_layers * spec.num_outer:
        raise ValueError(
            f"{where}: each block in {name} must hold nl·no = "
            f"{spec.num_layers * spec.num_outer} arrays (the spec's), got {per_block}"
        )
    if tuple(piece.shape) != layout.shape(spec)[2:]:
        raise ValueError(
            f"{where}: each array in {name} must have shape [{inner}] = "
            f"{list(layout.shape(spec)[2:])} (the spec's), got {checks.show(piece)}"
        )
    _match_dtype(where, name, piece, spec, str(dtype))
    return spec


def flatten_list(
    where: str, name: str, blocks: Sequence[Any], pieces: bool
) -> tuple[list[Any], int]:
    """All arrays of a list input, block by block, and how many a block has."""
    arrays = []
    if not pieces:
        for i, block in enumerate(blocks):
            if isinstance(block, (list, tuple)):
                raise ValueError(
                    f"{where}: {name} must be a list of arrays, but {name}[{i}] is a "
                    f"{type(block).__name__}"
                )
            arrays.append(checks.check_array(where, f"{name}[{i}]", block))
        return arrays, 1
    per_block = len(blocks[0])
    for i, block in enumerate(blocks):
        if not isinstance(block, (list, tuple)) or len(block) != per_block:
            got = f"{len(block)}" if isinstance(block, (list, tuple)) else type(block)
            raise ValueError(
                f"{where}: every block in {name} must be a list of the same nl·no "
                f"arrays; {name}[0] has {per_block}, {name}[{i}] has {got}"
            )
        for j, piece in enumerate(block):
            arrays.append(checks.check_array(where, f"{name}[{i}][{j}]", piece))
    if not arrays:
        raise ValueError(f"{where}: the blocks in {name} hold no arrays")
    return arrays, per_block


def check_same(
    where: str, name: str, arrays: Sequence[Any], per_block: int | None
) -> np.dtype:
    """Every array of a list must be alike in shape, dtype and device."""

    def label(i: int) -> str:
        if per_block is None:
            return f"{name}[{i}]"
        return f"{name}[{i // per_block}][{i % per_block}]"

    first = arrays[0]
    dtype = checks.check_dtype(where, label(0), first.dtype)
    devices = _devices(first)
    for i, x in enumerate(arrays):
        if np.dtype(x.dtype) != dtype:
            raise TypeError(
                f"{where}: all arrays in {name} must have one dtype; {label(0)} is "
                f"{checks.show(first)}, {label(i)} is {checks.show(x)}; cast them"
            )
        if tuple(x.shape) != tuple(first.shape):
            raise ValueError(
                f"{where}: all arrays in {name} must have one shape; {label(0)} is "
                f"{checks.show(first)}, {label(i)} is {checks.show(x)}"
            )
        if devices is not None and _devices(x) not in (None, devices):
            raise ValueError(
                f"{where}: all arrays in {name} must be on the same devices; "
                f"{label(0)} is on {_names(devices)}, {label(i)} on "
                f"{_names(_devices(x))}; move them with jax.device_put"
            )
    return dtype


def _devices(x: Any) -> set[Any] | None:
    """The devices of a concrete jax array; None for tracers and NumPy arrays."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return None
    return set(x.devices())


def _names(devices: set[Any] | None) -> str:
    return ", ".join(sorted(str(d) for d in devices or ()))


def spec_of_operational(
    where: str, x: Any, layout: str, num_kv_heads: int | None, head_dim: int | None
) -> BlockSpec:
    """The spec of operational blocks, which do not say it all themselves."""
    if num_kv_heads is None or head_dim is None:
        raise ValueError(
            f"{where}: an operational block does not tell nt, nh and hd apart; pass "
            "spec=, or num_kv_heads= and head_dim="
        )
    num_kv_heads, head_dim = checks.check_positive(
        where, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    first = x[0] if isinstance(x, (list, tuple)) and len(x) else x
    if isinstance(x, (list, tuple)) and not x:
        return BlockSpec(1, 1, 1, num_kv_heads, head_dim, np.dtype(np.float32), layout)
    first = checks.check_array(where, "operational", first)
    dtype = checks.check_dtype(where, "operational", first.dtype)
    if first.ndim < 3:
        raise ValueError(
            f"{where}: operational must have shape [..., nl, no, inner], got "
            f"{checks.show(first)}"
        )
    layers, outer, inner = first.shape[-3:]
    if inner == 0 or inner % (num_kv_heads * head_dim):
        raise ValueError(
            f"{where}: operational has inner = {inner}, which is not a multiple of "
            f"num_kv_heads·head_dim = {num_kv_heads}·{head_dim}"
        )
    _check_outer(where, "operational's outer extent (no)", outer)
    tokens = inner // (num_kv_heads * head_dim)
    return BlockSpec(layers, outer, tokens, num_kv_heads, head_dim, dtype, layout)
