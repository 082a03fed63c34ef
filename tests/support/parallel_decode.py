"""Ragged calls of paged attention whose blocks are dealt out to devices, and run there.

Truth, cases and poison are those of paged_model.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import placed
from paged_model import Case, Drawn

import jax_kvblock as kv
from jax_kvblock.parallel import (
    interleaved_paged_attention,
    kv_heads_partition,
    repeat_kv_heads,
    repeat_spec,
)

OUT = (P(), P())


def mesh_of(
    size: int, axis_type: AxisType = AxisType.Auto, platform: str = "cpu"
) -> Mesh:
    devices = jax.devices(platform)[:size]
    return jax.make_mesh((size,), ("cp",), (axis_type,), devices=devices)


class Dealt(Drawn):
    """A drawn call, its blocks dealt out to `size` devices.

    Attributes:
      own_k, own_v: `[size P, T, K, D]`, of each device P blocks, NaN where no key is.
      own_tables: int32 `[B, W]`, in column g the id of block g in its own device's
        pool; −1 beyond the sequence.
    """

    def __init__(
        self, case: Case, rng: np.random.Generator, size: int, implementation: Any,
        platform: str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__(case, rng, implementation)
        self.size, self.platform = size, platform
        blocks = len(self.k)
        self.own_k, self.own_v = (
            np.full((size, blocks, *a.shape[1:]), np.nan, a.dtype)
            for a in (self.k, self.v)
        )
        self.own_tables = np.full_like(self.tables, -1)
        free = [iter(rng.permutation(blocks)) for _ in range(size)]
        for b, g in zip(*np.nonzero(self.tables >= 0), strict=True):
            own = next(free[g % size])
            self.own_k[g % size, own] = self.k[self.tables[b, g]]
            self.own_v[g % size, own] = self.v[self.tables[b, g]]
            self.own_tables[b, g] = own
        self.own_k, self.own_v = (
            a.reshape(-1, *a.shape[2:]) for a in (self.own_k, self.own_v)
        )

    def tables_of_devices(self) -> np.ndarray:
        """int32 `[size, B, ceil(W / size)]`: by hand, as the convention says it."""
        batch, width = self.tables.shape
        made = np.full((self.size, batch, -(-width // self.size)), -1, np.int32)
        for i in range(self.size):
            columns = self.own_tables[:, i :: self.size]
            made[i, :, : columns.shape[1]] = columns
        return made

    @property
    def pages(self) -> Any:
        return self.own_k, self.own_v

    def own_run(self, check_vma: bool = True, **changes: Any) -> Any:
        """out and lse, the same on all devices."""
        function, args = self.function(check_vma, **changes)
        return jax.jit(function)(*args)

    def function(self, check_vma: bool = True, **changes: Any) -> Any:
        """The call over a mesh, a function of arrays; and these."""
        fixed: dict[str, Any] = {"implementation": self.implementation, "layer": None}
        given = {
            "q": self.q,
            "block_tables": self.tables_of_devices(),
            "kv_lens": self.kv_lens,
            "query_start": self.starts,
            "pages": self.pages,
        }
        for name, value in (given | self.options | changes).items():
            arrays = jax.tree.leaves(value)
            if arrays and all(isinstance(a, np.ndarray | jax.Array) for a in arrays):
                given[name] = value
            else:
                fixed[name] = value
                given.pop(name, None)
        cut = ("block_tables", "pages", *changes.get("cut", ()))
        fixed.pop("cut", None)
        specs = {
            name: jax.tree.map(lambda _, n=name: P("cp") if n in cut else P(), value)
            for name, value in given.items()
        }

        def local(given: dict[str, Any]) -> Any:
            given = dict(given) | fixed
            given["block_tables"] = given["block_tables"][0]
            return interleaved_paged_attention(**given, axis_name="cp", return_lse=True)

        mapped = jax.shard_map(
            local,
            mesh=mesh_of(self.size, platform=self.platform),
            in_specs=(specs,),
            out_specs=OUT,
            check_vma=check_vma,
        )
        return mapped, (given,)


def reductions(text: str) -> list[tuple[str, int]]:
    """What of a compiled program travels between devices: kinds and elements."""
    kinds = r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+"
    found = []
    for line in text.splitlines():
        made = re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line)
        if made:
            shapes = re.findall(r"\w+\[([\d,]*)\]", made[1])
            sizes = [int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes]
            found.append((made[2], sum(sizes)))
    return found


def heads_over(
    mesh: Mesh, kv_heads: int, dtype: Any, rng: np.random.Generator
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """A prompt and a step behind it, of heads that a mesh of one axis cuts: appended
    and attended to there, where nothing may travel, and on one device.

    Fewer KV heads than devices are repeated.
    """
    (axis,) = mesh.axis_names
    tables, prompt = np.int32([[3, 1, 7], [2, 6, -1]]), 20
    steps = [
        tuple(
            rng.standard_normal((2, tokens, heads, 64)).astype(dtype)
            for heads in (8, kv_heads, kv_heads)
        )
        for tokens in (prompt, 1)
    ]
    narrow = kv.BlockSpec(2, 2, 16, kv_heads, 64, dtype)
    wide = repeat_spec(narrow, mesh.size)
    cut = NamedSharding(mesh, kv_heads_partition(wide, axis))
    here = jnp.zeros((9, *narrow.block_shape), dtype)
    over = placed(np.zeros((9, *wide.block_shape), dtype), cut)

    def step(spec: kv.BlockSpec, devices: int, data: Any, qkv: Any, first: Any) -> Any:
        q, k, v = qkv
        rows = jnp.arange(q.shape[1], dtype=jnp.int32) + first
        slots = jnp.asarray(tables)[:, rows // 16] * 16 + rows % 16
        k, v = (
            repeat_kv_heads(a, devices).reshape(-1, spec.num_kv_heads, 64)
            for a in (k, v)
        )
        pool = kv.append_kv(kv.KVPool(data, spec), 1, k, v, slots.reshape(-1))
        lens = jnp.full(2, q.shape[1], jnp.int32) + first
        return pool.data, kv.paged_attention(q, pool, 1, tables, lens)

    for qkv, first in zip(steps, (0, prompt), strict=True):
        one = jax.jit(functools.partial(step, narrow, 1), donate_argnums=0)
        here, want = one(here, qkv, np.int32(first))
        put = tuple(
            placed(a, NamedSharding(mesh, spec))
            for a, spec in zip(qkv, (P(None, None, axis), P(), P()), strict=True)
        )
        with jax.set_mesh(mesh):
            all_of = jax.jit(functools.partial(step, wide, mesh.size), donate_argnums=0)
            compiled = all_of.lower(over, put, np.int32(first)).compile()
            assert reductions(compiled.as_text()) == []
            over, got = compiled(over, put, np.int32(first))
        yield got, want


def pool_of_blocks(drawn: Dealt, layout: str = "NHD") -> kv.KVPool:
    """Each device's keys and values in layer 1 of three; the others hold NaN."""
    k, v = drawn.own_k, drawn.own_v
    spec = kv.BlockSpec(3, 2, *k.shape[1:], k.dtype, layout=layout)
    blocks = np.full((len(k), 3, 2, *k.shape[1:]), np.nan, k.dtype)
    blocks[:, 1, 0], blocks[:, 1, 1] = k, v
    order = "".join(axis for group in spec.block_layout.groups for axis in group)
    axes = [0, *(1 + "LOTHD".index(axis) for axis in order)]
    data = blocks.transpose(axes).reshape(-1, *spec.block_shape)
    return kv.KVPool(jnp.asarray(data), spec)
