"""Paged attention over meshes, beside one device: what comes out, and what travels.

Run as a script with `--xla_force_host_platform_device_count=8` it does EIGHT.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_kvblock as kv

BLOCKS, DIM = 512, 16
TABLES = np.array([[3, 401, 5], [7, 2, -1]], np.int32)
LENS, STARTS = np.array([11, 6], np.int32), np.array([0, 2, 5], np.int32)


@dataclasses.dataclass(frozen=True)
class Cut:
    """N query heads over mesh axes "a", "b", …, and K key heads over some of them."""

    heads: int
    kv_heads: int
    mesh: tuple[int, ...]
    q: Any
    pool: Any = None
    result: Any = ()  # as q, unless told
    moves_q: bool = False
    layout: str = "NHD"
    contiguous: bool = True
    sinks: bool = False
    scales: str = ""


FOUR = {
    "two key heads on four": Cut(8, 2, (4,), "a"),
    "one key head on four": Cut(8, 1, (4,), "a"),
    "three key heads on four": Cut(12, 3, (4,), "a", sinks=True),
    "four key heads, whole on each": Cut(8, 4, (4,), "a", layout="HND"),
    "no groups, whole on each": Cut(4, 4, (2,), "a", contiguous=False),
    "six key heads on four": Cut(12, 6, (4,), "a"),
    "cut as far as they go": Cut(8, 2, (2, 2), ("a", "b"), "a", sinks=True),
    "cut over the later axis": Cut(8, 2, (2, 2), ("a", "b"), "b", moves_q=True),
    "cut over another axis": Cut(8, 2, (2, 2), "a", "b", moves_q=True),
    "queries whole": Cut(8, 4, (4,), None, "a", moves_q=True),
    "no axis of heads": Cut(8, 2, (4,), "a", layout="operational"),
    "universal": Cut(8, 2, (4,), "a", layout="universal"),
    "scales of heads": Cut(8, 2, (4,), "a", scales="heads"),
    "scales of tokens": Cut(8, 4, (2, 2), ("a", "b"), "a", scales="tokens"),
}
EIGHT = {
    AxisType.Auto: Cut(16, 2, (8,), "a"),
    AxisType.Explicit: Cut(16, 4, (2, 4), ("a", "b"), "a"),
}


def hold(cut: Cut, axis_type: AxisType, rng: np.random.Generator) -> None:
    """As on one device, each cut as it should be, and no cache that moves."""
    names = tuple("abc"[: len(cut.mesh)])
    devices = jax.devices("cpu")[: int(np.prod(cut.mesh))]
    mesh = jax.make_mesh(cut.mesh, names, (axis_type,) * len(names), devices=devices)
    run, args, specs, pool = drawn(cut, rng)
    want = jax.jit(run)(*args)
    put = [
        jax.device_put(a, NamedSharding(mesh, P(*spec)))
        for a, spec in zip(args, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(*put).compile()
        got = compiled(*put)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)
    result = NamedSharding(mesh, P(None, cut.q if cut.result == () else cut.result))
    if not cut.moves_q:
        assert got[0].sharding.is_equivalent_to(result, 3)
    parts = np.prod([mesh.shape[n] for n in cut.pool or ()])
    text = compiled.as_text()
    assert large(text, pool.arrays[0].size / parts / pool.spec.num_kv_heads / 4) == []
    assert cut.moves_q or not re.search(r"all-|collective", text)


def drawn(cut: Cut, rng: np.random.Generator) -> Any:
    """A function of arrays, these, how they are cut, and the pool."""
    dtype = jnp.dtype("int8" if cut.scales else "float32")
    spec = kv.BlockSpec(2, 2, 4, cut.kv_heads, DIM, dtype, layout=cut.layout)
    pool = kv.KVPool.zeros(spec, BLOCKS, contiguous=cut.contiguous)
    groups = spec.block_layout.groups[0 if cut.contiguous else 1 :]
    heads = [1 + i for i, group in enumerate(groups) if group[0] == "H"]
    pools = [
        jnp.asarray(rng.standard_normal(a.shape) * (30 if cut.scales else 1), dtype)
        for a in pool.arrays
    ]
    of_pool = (*[None] * heads[0], cut.pool) if heads else ()
    args = [*pools, rng.standard_normal((5, cut.heads, DIM)).astype(np.float32)]
    specs: list[Any] = [*[of_pool] * len(pools), (None, cut.q)]
    shape = {"heads": (), "tokens": (2, BLOCKS, spec.block_size)}.get(cut.scales)
    if shape is not None:
        args.append(rng.uniform(0.1, 1, (*shape, cut.kv_heads)).astype(np.float32))
        specs.append((*[None] * len(shape), cut.pool))
    args += [np.int32(1), TABLES, LENS, STARTS]
    args += [rng.standard_normal(cut.heads).astype(np.float32)] * cut.sinks
    specs += [(), (), (), ()] + [(cut.q,)] * cut.sinks

    def run(*args: Any) -> Any:
        given = list(args)
        arrays = [given.pop(0) for _ in pools]
        data = arrays[0] if cut.contiguous else tuple(arrays)
        q = given.pop(0)
        scale = given.pop(0) if cut.scales else None
        layer, tables, lens, starts, *sinks = given
        return kv.paged_attention(
            q, kv.KVPool(data, spec), jnp.asarray(layer), tables, lens,
            query_start=starts, sinks=sinks[0] if sinks else None,
            k_scale=scale, v_scale=scale, return_lse=True,
        )  # fmt: skip

    return run, args, specs, pool


def large(text: str, least: float) -> list[str]:
    """Instructions of a compiled program that make as many elements, or more."""
    free = "parameter|get-tuple-element|bitcast|while|conditional|tuple"
    found = []
    for line in text.splitlines():
        made = re.search(r"= \w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
        if made is None or re.fullmatch(free, made[2]):
            continue
        if np.prod([int(n) for n in made[1].split(",") if n]) >= least:
            found.append(line.strip())
    return found


if __name__ == "__main__":
    for of, case in EIGHT.items():
        hold(case, of, np.random.default_rng(0))
    print(f"{len(jax.devices('cpu'))} devices")
