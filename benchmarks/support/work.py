"""The work on blocks, as groups of jobs: ours beside XLA's from plain jax.numpy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import (
    BlockSpec,
    KVPool,
    append_kv,
    block_to_operational,
    block_to_universal,
    convert_blocks,
    gather_blocks,
    operational_to_block,
    scatter_blocks,
    universal_to_block,
)
from support import xla
from support.blocks import AXES, Data, axis_order, place, random_blocks, run_bytes
from support.common import OURS
from support.jobs import Group, Job

# ---- the copy that everything is measured against ------------------------------------


def plain_copy(data: Data) -> Job:
    """The same bytes by one cudaMemcpyAsync, called through jax as the others are.

    It takes turns with them, so clocks, memory and the cost of a call are the same.
    """
    block = data.blocks["NHD"]
    flat = block.reshape(data.n, data.spec.num_layers, data.spec.num_outer, -1)
    call = functools.partial(
        block_to_operational, spec=data.spec, implementation="async"
    )
    return Job("copy, cudaMemcpyAsync", call, (block,), flat)


# ---- conversions ---------------------------------------------------------------------


def conversions(data: Data) -> list[Group]:
    """Every pair of NHD, HND and universal."""
    spec = data.spec
    groups = []
    for src in AXES:
        for dst in AXES:
            if src == dst:
                continue
            ours: Any
            if dst == "universal":
                ours = functools.partial(block_to_universal, layout=src, spec=spec)
            elif src == "universal":
                ours = functools.partial(universal_to_block, layout=dst, spec=spec)
            else:
                ours = functools.partial(convert_blocks, src=src, dst=dst, spec=spec)
            plain = functools.partial(jnp.transpose, axes=axis_order(src, dst))
            source, expected = data.blocks[src], data.blocks[dst]
            groups.append(
                Group(
                    f"{data.name} / {src} to {dst}",
                    data.moved,
                    [
                        Job(OURS, ours, (source,), expected),
                        Job("xla", plain, (source,), expected),
                    ],
                    run_bytes(spec, src, dst),
                    arrays={"spec": spec, "source": source},
                )
            )
    return groups


def operational(
    data: Data, implementations: tuple[str, ...] = ("kernel",)
) -> list[Group]:
    """NHD and HND to and from operational: for stacked blocks, one long copy."""
    spec, groups = data.spec, []
    for layout in ("NHD", "HND"):
        block = data.blocks[layout]
        flat = block.reshape(data.n, spec.num_layers, spec.num_outer, -1)
        for there in (True, False):
            source, expected = (block, flat) if there else (flat, block)
            jobs = []
            for implementation in implementations:
                ours: Any = block_to_operational if there else operational_to_block
                name = (
                    OURS if implementation == "kernel" else f"{OURS}, {implementation}"
                )
                call = functools.partial(
                    ours, layout=layout, spec=spec, implementation=implementation
                )
                jobs.append(Job(name, call, (source,), expected))
            plain = functools.partial(jnp.reshape, shape=expected.shape)
            jobs.append(Job("xla", plain, (source,), expected))
            names = (layout, "operational") if there else ("operational", layout)
            groups.append(
                Group(
                    f"{data.name} / {names[0]} to {names[1]}",
                    data.moved,
                    jobs,
                    spec.block_bytes // (spec.num_layers * spec.num_outer),
                    arrays={"spec": spec, "source": source},
                )
            )
    return groups


# ---- pools ---------------------------------------------------------------------------


def gathers(data: Data, loops: bool = False) -> list[Group]:
    """Blocks of NHD, HND and universal pools, by random ids, to universal.

    With `loops`, also "xla loop": a fori_loop over the blocks in place of the gather.
    """
    groups, expected = [], data.blocks["universal"]
    for layout in AXES:
        order = axis_order(layout, "universal")
        forms = _forms(data, layout)
        jobs = []
        for suffix, pool in forms.items():
            ours = functools.partial(_gather, data.pool_spec(layout))
            jobs.append(Job(OURS + suffix, ours, (pool, data.ids), expected))
            plain = functools.partial(xla.gather, order)
            jobs.append(Job("xla" + suffix, plain, (pool, data.ids), expected))
        args, name = (forms[""], data.ids), "xla, as uint16"
        jobs.append(
            Job(name, functools.partial(xla.gather_bits, order), args, expected)
        )
        if loops and layout != "universal":
            loop = functools.partial(xla.loop_gather, order)
            jobs.append(Job("xla loop", loop, args, expected))
        groups.append(_pool_group(data, "gather", layout, jobs, forms))
    return groups


def scatters(data: Data, loops: bool = False) -> list[Group]:
    """Universal blocks into NHD, HND and universal pools, by random ids, donated."""
    groups, blocks = [], data.blocks["universal"]
    args = (data.ids, blocks)
    for layout in AXES:
        order = axis_order("universal", layout)
        jobs = []
        for suffix, pool in _forms(data, layout).items():
            ours = functools.partial(_scatter, data.pool_spec(layout))
            jobs.append(Job(OURS + suffix, ours, args, pool, in_place=True))
            plain = functools.partial(xla.scatter, order)
            jobs.append(Job("xla" + suffix, plain, args, pool, in_place=True))
        expected = data.pools[layout]
        bits = functools.partial(xla.scatter_bits, order)
        loop = functools.partial(xla.loop_scatter, order)
        jobs.append(Job("xla, as uint16", bits, args, expected, in_place=True))
        if loops and layout != "universal":
            jobs.append(Job("xla loop", loop, args, expected, in_place=True))
        groups.append(_pool_group(data, "scatter", layout, jobs, {"": blocks}))
    return groups


def _forms(data: Data, layout: str) -> dict[str, Any]:
    """The pool as one array, and as one per layer where layers are outermost."""
    forms: dict[str, Any] = {"": data.pools[layout]}
    if layout != "universal":
        forms[", layered pool"] = data.layers[layout]
    return forms


def _pool_group(
    data: Data, verb: str, layout: str, jobs: list[Job], forms: dict[str, Any]
) -> Group:
    arrays = {"spec": data.pool_spec(layout), "source": forms[""], "ids": data.ids}
    if ", layered pool" in forms:
        arrays["layers"] = forms[", layered pool"]
    run = run_bytes(data.spec, layout, "universal")
    case = f"{data.name} / {verb}, {layout} pool"
    return Group(case, data.moved, jobs, run, arrays=arrays)


def _gather(spec: BlockSpec, pool: Any, ids: jax.Array) -> jax.Array:
    return gather_blocks(KVPool(pool, spec), ids)


def _scatter(spec: BlockSpec, pool: Any, ids: jax.Array, blocks: jax.Array) -> Any:
    return scatter_blocks(KVPool(pool, spec), ids, blocks).data


# ---- pools inside lax.scan -----------------------------------------------------------


def scans(data: Data, steps: int = 8, tokens: int = 256) -> list[Group]:
    """A donated pool as the carry of a scan: scatters, and appends layer by layer."""
    spec, layers = data.spec, data.spec.num_layers
    steps = min(steps, data.n)
    each = data.n // steps
    ids = data.ids[: steps * each].reshape(steps, each)
    blocks = data.blocks["universal"][:each]

    def scatter(pool: jax.Array, ids: jax.Array, blocks: jax.Array) -> jax.Array:
        def step(pool: KVPool, ids: jax.Array) -> tuple[KVPool, None]:
            return scatter_blocks(pool, ids, blocks), None

        return jax.lax.scan(step, KVPool(pool, spec), ids)[0].data

    tiled = jnp.tile(data.blocks["NHD"][:each], (steps, *[1] * 5))
    filled = place(tiled, ids.reshape(-1), data.num_blocks)

    tokens = min(tokens, data.num_blocks * spec.block_size)
    rng = np.random.default_rng(1)
    slots = rng.permutation(data.num_blocks * spec.block_size)[:tokens].astype(np.int32)
    shape = (2, tokens, spec.num_kv_heads, spec.head_dim)
    k, v = random_blocks(shape, spec.dtype.name, 1)

    def append(pool: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> Any:
        def step(pool: KVPool, layer: jax.Array) -> tuple[KVPool, None]:
            return append_kv(pool, layer, k, v, slots), None

        return jax.lax.scan(step, KVPool(pool, spec), jnp.arange(layers))[0].data

    appended = jnp.zeros_like(data.pools["NHD"])
    for outer, x in enumerate((k, v)):
        places = (slots // spec.block_size, slice(None), outer, slots % spec.block_size)
        appended = appended.at[places].set(x[:, None])
    scattered = 2 * steps * each * spec.block_bytes
    written = 2 * tokens * layers * spec.num_outer * k[0].nbytes
    return [
        Group(
            f"{data.name} / scatter in a scan, NHD pool",
            scattered,
            [Job(OURS, scatter, (ids, blocks), filled, in_place=True)],
        ),
        Group(
            f"{data.name} / append_kv in a scan over layers",
            written,
            [Job(OURS, append, (k, v, jnp.asarray(slots)), appended, in_place=True)],
            parts=layers,
            part="layer",
        ),
    ]
