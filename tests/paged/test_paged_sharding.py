"""Paged attention over meshes: the cache stays as its owner laid it out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_meshes
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_kvblock as kv
from jax_kvblock.paged import cuda
from jax_kvblock.paged.call import Paged, PagedConfig
from jax_kvblock.paged.heads import HeadPart
from jax_kvblock.paged.pages import PAIR, Pages

EXPLICIT = ["two key heads on four", "three key heads on four", "cut as far as they go"]
EXPLICIT += ["cut over another axis", "queries whole", "scales of tokens"]


@pytest.mark.parametrize("name", paged_meshes.FOUR)
def test_four_devices(name, four_cpus, rng):
    paged_meshes.hold(paged_meshes.FOUR[name], AxisType.Auto, rng)


@pytest.mark.parametrize("name", EXPLICIT)
def test_four_devices_of_an_explicit_mesh(name, four_cpus, rng):
    paged_meshes.hold(paged_meshes.FOUR[name], AxisType.Explicit, rng)


def mesh_of_four() -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("a",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])


@pytest.mark.cpu
def test_eight_devices():
    script = Path(paged_meshes.__file__)
    flags = "--xla_force_host_platform_device_count=8"
    flags += " --xla_backend_optimization_level=0"
    package = str(Path(kv.__file__).parents[1])
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    made = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path}
        | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert made.stdout == "8 devices\n", made.stderr


def test_a_cache_that_moves_would_be_seen(four_cpus, rng):
    """Its heads cut out on the device, or gathered from others."""
    cut = paged_meshes.FOUR["two key heads on four"]
    _, args, _, pool = paged_meshes.drawn(cut, rng)
    mesh = mesh_of_four()
    blocks = jax.device_put(args[0], NamedSharding(mesh, P()))
    least = pool.arrays[0].size / 2 / 4

    def cut_out(blocks: Any) -> Any:
        def local(blocks: Any) -> Any:
            own = jax.lax.axis_index("a") // 2
            part = jax.lax.dynamic_slice_in_dim(blocks, own, 1, 4)
            spec = pool.spec.replace(num_kv_heads=1)
            return kv.gather_kv(kv.KVPool(part, spec), 1, [3])[0]

        spec = P(None, "a")
        return jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=spec)(blocks)

    text = jax.jit(cut_out).lower(blocks).compile().as_text()
    assert paged_meshes.large(text, least)
    spread = jax.device_put(args[0], NamedSharding(mesh, P("a")))
    whole = jax.jit(lambda a: a + 1, out_shardings=NamedSharding(mesh, P()))
    assert paged_meshes.large(whole.lower(spread).compile().as_text(), least)


@pytest.mark.parametrize("name", ["two key heads on four", "three key heads on four"])
def test_shard_map_says_which_heads_a_device_has(name, four_cpus, rng):
    cut = paged_meshes.FOUR[name]
    run, args, _, _ = paged_meshes.drawn(cut, rng)
    want = jax.jit(run)(*args)
    mesh = mesh_of_four()
    spec = kv.BlockSpec(2, 2, 4, cut.kv_heads, 16, "float32")
    blocks, q, layer, tables, lens, starts, *sinks = args

    def local(blocks: Any, q: Any, sinks: Any) -> Any:
        first = jax.lax.axis_index("a") * q.shape[1]
        return kv.paged_attention(
            q, kv.KVPool(blocks, spec), jnp.asarray(layer), tables, lens,
            query_start=starts, sinks=sinks, q_heads=(first, cut.heads),
            return_lse=True,
        )  # fmt: skip

    heads = P(None, "a")
    of_sinks = sinks[0] if sinks else None
    mapped = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(P(), heads, P("a")), out_specs=(heads, heads)
        )
    )
    for x, y in zip(mapped(blocks, q, of_sinks), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)
    compiled = mapped.lower(blocks, q, of_sinks).compile()
    assert paged_meshes.large(compiled.as_text(), blocks.size / cut.kv_heads / 4) == []


# ---- some of the heads, on one device ------------------------------------------------

STORED = ["float", "int8", "int8 tokens", "int8 all layers"]
PARTS = [("xla", "NHD", True, True, stored) for stored in STORED]
PARTS += [
    pytest.param(by, *case, marks=marks)
    for by, marks in (
        ("cuda", [pytest.mark.gpu]),
        ("emulator", [pytest.mark.wide, pytest.mark.cpu]),
    )
    for case in (
        *(("NHD", c, t, s) for c in (True, False) for t in (0, 1) for s in STORED),
        *(
            (layout, True, t, "float")
            for layout in ("HND", "universal")
            for t in (0, 1)
        ),
    )
]


@pytest.mark.parametrize(("by", "layout", "contiguous", "traced", "stored"), PARTS)
def test_parts_are_parts_of_the_whole(
    by, layout, contiguous, traced, stored, rng, request
):
    """Four parts of 12 heads with 3 key heads, two of which lie in two groups each."""
    if by == "emulator":
        request.getfixturevalue("paged_as_cuda")
        by = "cuda"
    dtype = "bfloat16" if by == "cuda" else "float32"
    of_pool = dtype if stored == "float" else "int8"
    spec = kv.BlockSpec(3, 2, 8, 3, 16, of_pool, layout=layout)
    made = rng.standard_normal((9, *spec.block_shape)) * (1 if stored == "float" else 9)
    data = jnp.asarray(made, jnp.dtype(of_pool))
    if not contiguous:
        data = tuple(data[:, i] for i in range(3))
    pool = kv.KVPool(data, spec)
    options: dict[str, Any] = {}
    if stored == "int8":
        options = {"k_scale": 0.1, "v_scale": np.float32([0.1, 0.2, 0.3])}
    shape = {"int8 tokens": (9, 8, 3), "int8 all layers": (3, 9, 8, 3)}.get(stored)
    if shape:
        scales = [rng.uniform(0.05, 0.2, shape).astype(np.float32) for _ in "kv"]
        options = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    q = jnp.asarray(rng.standard_normal((6, 12, 16)), dtype)
    sinks = jnp.asarray(rng.standard_normal(12), jnp.float32)
    fixed = {"query_start": np.array([0, 1, 6]), "return_lse": True, **options}
    fixed["implementation"] = by
    call = (pool, jnp.int32(2) if traced else 2, [[4, 1, 8], [0, -1, 3]], [20, 22])
    want = kv.paged_attention(q, *call, sinks=sinks, **fixed)

    @jax.jit
    def part(q: Any, sinks: Any, first: Any) -> Any:
        return kv.paged_attention(q, *call, sinks=sinks, q_heads=(first, 12), **fixed)

    bar = 2e-2 if by == "cuda" else 2e-6
    for i in range(0, 12, 3):
        own = slice(i, i + 3)
        got = part(q[:, own], sinks[own], jnp.int32(i))
        for x, y in zip(got, want, strict=True):
            x, y = (np.asarray(a, np.float32) for a in (x, y[:, own]))
            np.testing.assert_allclose(x, y, rtol=0, atol=bar)


def test_parts_under_vmap(rng):
    """Of the parts, and of queries that have a part in common."""
    pages = tuple(rng.standard_normal((2, 5, 4, 2, 16)).astype(np.float32))
    q = rng.standard_normal((3, 8, 16)).astype(np.float32)
    call = (pages, None, [[4, 1]], [7])

    def part(q: Any, first: Any) -> Any:
        heads = (first, 8)
        return kv.paged_attention(q, *call, query_start=[0, 3], q_heads=heads)

    want = kv.paged_attention(q, *call, query_start=[0, 3])
    parts = q.reshape(3, 4, 2, 16)
    got = jax.vmap(part, (1, 0), 1)(parts, jnp.arange(0, 8, 2))
    np.testing.assert_allclose(got.reshape(3, 8, 16), want, rtol=0, atol=2e-6)
    twice = jax.vmap(part, (0, None))(np.stack([parts[:, 3]] * 2), jnp.int32(6))
    for one in twice:
        np.testing.assert_allclose(one, want[:, 6:], rtol=0, atol=2e-6)


@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "universal", "pair"])
def test_where_the_kernels_find_them(layout, traced, rng):
    """The addresses are those of the heads' keys, and none lies outside the array."""
    spec = kv.BlockSpec(3, 2, 4, 6, 8, "float32", layout="NHD")
    if layout == "pair":
        arrays = tuple(jnp.arange(2 * 4 * 6 * 8).reshape(2, 4, 6, 8) for _ in range(2))
        pages: Any = Pages(arrays, PAIR)
        traced, layers = False, [None]
    else:
        spec = spec.replace(layout=layout)
        size = int(np.prod(spec.block_shape))
        data = jnp.arange(2 * size, dtype=jnp.float32).reshape(2, *spec.block_shape)
        pages = kv.KVPool(data, spec)
        layers = [0, 2, 3, -1] if traced else [1]
    count = 2
    for layer in layers:
        given = None if not traced else jnp.array([layer], jnp.int32)
        config = PagedConfig(None, None if traced else layer)  # type: ignore[arg-type]
        x = Paged(None, pages, given, *[None] * 5)  # type: ignore[arg-type]
        cache = cuda._cache(config, pages)
        for first in (0, 2, 4):
            part = HeadPart(jnp.int32(first), count)
            made = cuda._of_heads(config, x, cache, part)
            assert made is not None
            at = int(made[0].layer[0])
            if layer in (3, -1):
                assert at == -1
                continue
            assert 0 <= at < made[1].layers
            for outer, rows in ((0, made[1].k), (1, made[1].v)):
                number = layer or 0
                array = pages.arrays[outer if layout == "pair" else 0]
                flat = np.asarray(array).reshape(-1)
                end = rows.offset + (made[1].layers - 1) * made[1].layer_stride
                end += rows.block + 3 * rows.token + (count - 1) * rows.head + 8 * 4
                assert end <= flat.size * 4
                start = rows.offset + at * made[1].layer_stride
                start += rows.block + 3 * rows.token + rows.head
                if layout == "pair":
                    want = array[1, 3, first + 1]
                else:
                    k, v = kv.gather_kv(pages, number, [1])
                    want = (k, v)[outer][3, first + 1]
                np.testing.assert_array_equal(flat[start // 4 :][:8], want)


def test_messages():
    q, k = np.zeros((3, 2, 16), np.float32), np.zeros((5, 4, 2, 16), np.float32)

    def call(q_heads: Any) -> Any:
        return kv.paged_attention(
            q, (k, k), None, [[1]], [2], query_start=[0, 3], q_heads=q_heads
        )

    with pytest.raises(TypeError, match=r"q_heads must be a pair \(first, total\)"):
        call(3)
    with pytest.raises(ValueError, match="a multiple of q's 2, got 3"):
        call((0, 3))
    with pytest.raises(ValueError, match="of their number, 2, below 8, got 3"):
        call((3, 8))
    with pytest.raises(ValueError, match="a multiple of the blocks' 2 KV heads"):
        kv.paged_attention(
            q[:, :1], (k, k), None, [[1]], [2], query_start=[0, 3], q_heads=(0, 3)
        )
