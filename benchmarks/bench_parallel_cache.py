"""Caches over several GPUs: blocks that change their cut, and decode over devices.

`reshard_blocks` beside one `ppermute` of as many bytes as the busiest device gets. A
decode step of one long sequence whose blocks are dealt out to n GPUs, beside one GPU
that has them all, in a program of one layer and in one of eight, as models have more;
with fewer GPUs here, one that has an n-th of the blocks and nobody to merge with:
"one of n, alone".
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import common
from support.common import OURS, Results
from support.rounds import median_seconds

from jax_kvblock import BlockSpec, KVPool
from jax_kvblock.parallel import (
    interleaved_paged_attention,
    kv_heads_partition,
    reshard_blocks,
)

HEADS, KV_HEADS, DIM, DTYPE = 32, 8, 128, "bfloat16"
LAYERS, BLOCK, MOVED = 32, 16, (512, 2048)  # blocks of 2 MiB, in pools of twice as many
# Which devices have the source and the destination, and who sends to whom in one round.
RESHARDS = {
    "1 to 1, another": ((0,), (1,), ((0, 1),)),
    "2 to 1": ((0, 1), (0,), ((1, 0),)),
    "2 to 2, others": ((0, 1), (2, 3), ((0, 2), (1, 3))),
    "4 to 2": ((0, 1, 2, 3), (0, 2), ((1, 0), (3, 2))),
}
TOKENS, COUNTS, DEEP = 512 * 1024, (2, 4), 8


def bench(options: argparse.Namespace, results: Results) -> None:
    for name in RESHARDS:
        if len(jax.devices()) > max(max(part) for part in RESHARDS[name][:2]):
            for moved in MOVED[:1] if options.quick else MOVED:
                _reshard(name, moved, results, options.quick)
        else:
            print(f"reshard {name}: not run, it needs more devices")
        results.save()
    for page in (16, 64):
        for layers in (1, 2 if options.quick else DEEP):
            _decode(page, layers, results, options.quick)
            results.save()


# ---- blocks between pools ------------------------------------------------------------


def _reshard(name: str, moved: int, results: Results, quick: bool) -> None:
    src_at, dst_at, pairs = RESHARDS[name]
    layers, moved = (2, 8) if quick else (LAYERS, moved)
    pool = 2 * moved
    spec = BlockSpec(layers, 2, BLOCK, KV_HEADS, DIM, DTYPE)
    rng = np.random.default_rng(0)
    ids = [rng.permutation(pool)[:moved].astype(np.int32) for _ in range(2)]
    for form in ("HND", "NHD"):
        src = _pool(spec.replace(layout="NHD"), pool, src_at, fill=True)
        held = [_pool(spec.replace(layout=form), pool, dst_at)]

        def run(src: KVPool = src, held: list[KVPool] = held) -> Any:
            held[0] = reshard_blocks(src, ids[0], held[0], ids[1])
            return held[0].arrays

        run()
        _check(src, held[0], ids)
        got = moved * spec.block_bytes // len(src_at)  # by the busiest device
        calls = {OURS: run, "ppermute": _permute(got, src_at, dst_at, pairs)}
        case = f"{moved} blocks, NHD to {form} / reshard {name}"
        for who, seconds in median_seconds(calls, quick).items():
            results.add(case, who, "bandwidth", got / seconds / 1e9, "GB/s")


def _pool(
    spec: BlockSpec, blocks: int, at: Sequence[int], fill: bool = False
) -> KVPool:
    """Heads cut over these devices."""
    mesh = Mesh(np.array([jax.devices()[i] for i in at]), ("tp",))
    pool = KVPool.zeros(
        spec, blocks, device=NamedSharding(mesh, kv_heads_partition(spec, "tp"))
    )
    if not fill:
        return pool
    draw = functools.partial(jax.random.normal, shape=pool.data.shape, dtype=spec.dtype)
    data = jax.jit(draw, out_shardings=pool.sharding)(jax.random.key(0))
    return KVPool(data, spec)


def _check(src: KVPool, dst: KVPool, ids: Sequence[np.ndarray]) -> None:
    """Some of the blocks, to the bit; heads are an axis of both."""
    for at, to in list(zip(*ids, strict=True))[:: max(1, len(ids[0]) // 5)]:
        a, b = (
            np.asarray(pool.data[i]).view(np.uint16)
            for pool, i in ((src, at), (dst, to))
        )
        heads = [p.spec.block_layout.axes.replace(" ", "") for p in (src, dst)]
        order = [heads[0].index(axis) for axis in heads[1]]
        if not np.array_equal(a.transpose(order), b):
            raise AssertionError(f"block {at} did not arrive as {to}")


def _permute(
    count: int, src_at: Sequence[int], dst_at: Sequence[int], pairs: Any
) -> Callable[[], Any]:
    """One ppermute of so many bytes from each sender."""
    at = sorted({*src_at, *dst_at})
    mesh = Mesh(np.array([jax.devices()[i] for i in at]), ("all",))
    numbered = [(at.index(a), at.index(b)) for a, b in pairs]
    cut = P("all")
    x = jnp.zeros(len(at) * count, jnp.uint8, device=NamedSharding(mesh, cut))
    send = jax.shard_map(
        lambda x: jax.lax.ppermute(x, "all", numbered),
        mesh=mesh,
        in_specs=cut,
        out_specs=cut,
    )
    compiled = jax.jit(send).lower(x).compile()
    return lambda: compiled(x)


# ---- decode --------------------------------------------------------------------------


def _decode(page: int, layers: int, results: Results, quick: bool) -> None:
    tokens = 2048 if quick else TOKENS
    calls = {"one": _step(tokens, page, 1, layers)}
    for n in COUNTS:
        if len(jax.devices()) >= n:
            calls[f"{n}"] = _step(tokens, page, n, layers)
        else:
            calls[f"one of {n}, alone"] = _step(tokens // n, page, 1, layers)
    case = f"B1 H{HEADS}/{KV_HEADS} S{tokens} D{DIM}, pages of {page} / decode"
    case += "" if layers == 1 else f", {layers} layers"
    times = median_seconds(calls, quick)
    for name, seconds in times.items():
        who = OURS if name == "one" else f"{OURS}, {name}"
        results.add(case, who, "time", seconds * 1e3, "ms")
        results.add(case, who, "speed over one", times["one"] / seconds, "")


def _step(tokens: int, page: int, n: int, layers: int) -> Callable[[], Any]:
    """Of one sequence over n devices, whose pools are in random order."""
    mesh = Mesh(np.array(jax.devices()[:n]), ("cp",))
    spec = BlockSpec(layers, 2, page, KV_HEADS, DIM, DTYPE)
    blocks = tokens // page
    cut = NamedSharding(mesh, P("cp"))
    shape = jax.eval_shape(lambda: KVPool.zeros(spec, blocks)).data.shape
    draw = functools.partial(jax.random.normal, shape=shape, dtype=DTYPE)
    pool = KVPool(jax.jit(draw, out_shardings=cut)(jax.random.key(0)), spec)
    own = np.random.default_rng(0).permutation(blocks // n).astype(np.int32)
    everywhere = NamedSharding(mesh, P())
    q = jax.random.normal(jax.random.key(1), (1, 1, HEADS, DIM), DTYPE)
    rest = jax.device_put((q, own[None], np.array([tokens], np.int32)), everywhere)

    def attend(pool: KVPool, q: Any, tables: Any, lens: Any) -> Any:
        for layer in range(layers):
            q = interleaved_paged_attention(
                q, pool, layer, tables, lens, axis_name="cp"
            )
        return q

    step = jax.shard_map(
        attend, mesh=mesh, in_specs=(P("cp"), P(), P(), P()), out_specs=P()
    )
    compiled = jax.jit(step).lower(pool, *rest).compile()
    return lambda: compiled(pool, *rest)


if __name__ == "__main__":
    common.main("parallel-cache", bench, __doc__)
