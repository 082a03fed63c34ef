"""Attention over a sequence whose devices belong to several processes.

Each process runs this as a script, `RANK COUNT PORT CASE`. It makes its devices' parts
of the same arrays, and looks at what its devices have, beside one device's attention.
They are four CPU devices together, or as many as stand at the end; with `gpu` there, a
GPU for each process.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import traceback
from typing import Any

if __name__ == "__main__":
    RANK, COUNT, LAST = int(sys.argv[1]), int(sys.argv[2]), [*sys.argv, "4"][5]
    ON, SIZE = ("gpu", COUNT) if LAST == "gpu" else ("cpu", int(LAST))
    DEVICES = f"--xla_force_host_platform_device_count={SIZE // COUNT}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import placed

import jax_kvblock as kv
from jax_kvblock.parallel import (
    AttentionConfig,
    AttentionPatterns,
    context_parallel_attention,
    create_attention,
    from_zigzag,
    to_zigzag,
)
from jax_kvblock.parallel.layers import Attention

SHAPES = {"q": (1, 48, 4, 8), "k": (1, 48, 2, 8), "v": (1, 48, 2, 8)}
DTYPES = {"cpu": np.dtype(np.float32), "gpu": np.dtype(jnp.bfloat16)}  # as kernels take
BARS = {"cpu": {"rtol": 5e-6, "atol": 1e-5}, "gpu": {"rtol": 2e-2, "atol": 3e-2}}
LAYERS = {"cpu": BARS["cpu"], "gpu": {"rtol": 2e-5, "atol": 5e-5}}  # all in float32
CASES: dict[str, dict[str, Any]] = {
    "ring": {"causal": True, "kv_lens": [26]},
    "all_gather": {"causal": True, "kv_lens": [43]},
    "ulysses": {"window": (7, 3)},
    "ulysses_ring": {"causal": True},
    "ring of documents": {"causal": True, "cu_seqlens": [0, 16, 48]},
    "ring in runs": {"causal": True, "layout": "contiguous", "segment_ids": True},
    "auto": {"causal": True, "layout": "contiguous", "softcap": 2.0, "scale": 0.7},
}


def assert_same(got: jax.Array, want: Any, bars: Any = BARS) -> None:
    """The parts that are here."""
    assert got.addressable_shards
    want = np.asarray(want, np.float32)
    for part in got.addressable_shards:
        bar = bars[part.device.platform]
        data = np.asarray(part.data, np.float32)
        np.testing.assert_allclose(data, want[part.index], **bar)


def hold(name: str, mesh: Mesh) -> None:
    """out and gradients are one device's."""
    options = dict(CASES[name])
    packed = "cu_seqlens" in options
    cu = options.pop("cu_seqlens", None)
    in_runs = options.get("layout") == "contiguous"
    ids = np.sort(np.arange(48) % 3)[None] if options.pop("segment_ids", 0) else None
    rng = np.random.default_rng(0)
    dtype = DTYPES[mesh.devices.flat[0].platform]
    arrays = {n: rng.standard_normal(s).astype(dtype) for n, s in SHAPES.items()}
    if packed:
        arrays = {n: a[0] for n, a in arrays.items()}
    axis = 0 if packed else 1
    spec = P("c") if packed else P(None, "c")
    whole = {} if cu is None else {"cu_seqlens": (cu, cu)}
    parts = {} if cu is None else {"cu_seqlens": np.int32(cu)}

    def local(x: Any, ids: Any) -> jax.Array:
        strategy = name.split()[0]
        return context_parallel_attention(
            **x, axis_name="c", strategy=strategy, segment_ids=ids, **parts, **options
        )

    over = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)

    def with_slopes(f: Any, x: Any) -> Any:
        out, pull = jax.vjp(f, x)
        return out, pull(2 * out)[0]

    def lay(a: Any) -> Any:
        return a if in_runs else to_zigzag(a, mesh.size, axis=axis, cu_seqlens=cu)

    def put_there(a: Any) -> Any:
        return placed(np.asarray(lay(a)), NamedSharding(mesh, spec))

    put = {n: put_there(a) for n, a in arrays.items()}
    put_ids = None if ids is None else put_there(ids.astype(np.int32))
    run = jax.jit(lambda x, ids: with_slopes(lambda x: over(x, ids), x))
    out, slopes = run(put, put_ids)
    options.pop("layout", None)
    attend = lambda x: kv.flash_attention(  # noqa: E731
        **x, segment_ids=ids, **whole, **options
    )
    want, want_slopes = jax.jit(lambda x: with_slopes(attend, x))(arrays)
    assert_same(out, lay(want))
    for n, slope in slopes.items():
        assert_same(slope, lay(want_slopes[n]))


def hold_layers(mesh: Mesh) -> None:
    """Layers on a global array, under plain jit, with their gradients.

    In float32: in 16 bits every device's part of a weight's gradient is rounded before
    they are summed, and what they sum to may be far smaller than they are.
    """
    x = np.random.default_rng(1).standard_normal((1, 32, 16)).astype(np.float32)
    there = placed(x, NamedSharding(mesh, P(None, "c")))

    @jax.jit
    def run(layer: Any, x: Any) -> Any:
        with jax.default_matmul_precision("highest"):  # a GPU's own is less exact
            return layer_and_slopes(layer, x)

    for pattern in (AttentionPatterns.RING, AttentionPatterns.CONTEXT_PARALLEL):
        config = AttentionConfig(16, 2, pattern=pattern, axis_name="c", causal=True)
        layer = create_attention(config, mesh)
        got, slopes = run(layer, there)
        weights = [np.asarray(w.addressable_data(0)) for w in (layer.qkv, layer.out)]
        one = Attention(*weights, AttentionConfig(
            16, 2, pattern=AttentionPatterns.CAUSAL
        ))  # fmt: skip
        want, want_slopes = run(one, x)
        assert_same(got, want, LAYERS)
        for slope, other in zip(slopes, want_slopes, strict=True):
            assert_same(slope, other, LAYERS)


def layer_and_slopes(layer: Any, x: Any) -> Any:
    """The result, and the gradients of the weights and of x."""
    out, pull = jax.vjp(lambda qkv, back, x: dataclasses.replace(
        layer, qkv=qkv, out=back
    )(x), layer.qkv, layer.out, x)  # fmt: skip
    return out, pull(out)


def main(rank: int, count: int, port: str, case: str, on: str, size: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, rank, heartbeat_timeout_seconds=10,
        local_device_ids=[rank] if on == "gpu" else None,
    )  # fmt: skip
    mesh = Mesh(np.array(jax.devices(on)), ("c",))
    assert mesh.size == size
    if case in ("last dies", "first dies"):
        hold("ring", mesh)
        if rank == (0 if case == "first dies" else count - 1):
            os._exit(7)  # as a process that is killed does
        hold("ring of documents", mesh)
        print("it came through", flush=True)
        return
    names = [*CASES] if case == "all" else case.split(",")
    begun = time.monotonic()
    for name in names:
        hold(name, mesh)
        print(f"{name} after {time.monotonic() - begun:.0f} s", flush=True)
    hold_layers(mesh)
    x = to_zigzag(np.arange(32), 4, axis=0)
    np.testing.assert_array_equal(from_zigzag(x, 4, axis=0), np.arange(32))
    print(f"{rank} of {count}: {len(names) + 1} are right", flush=True)


if __name__ == "__main__":
    try:
        main(RANK, COUNT, sys.argv[3], sys.argv[4], ON, SIZE)
    except Exception:  # no waiting for the others at the end
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
