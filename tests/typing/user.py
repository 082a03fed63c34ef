"""What a user writes, as type checkers see it: nobody runs this.

mypy and pyright accept every line. A line that ends in `# wrong` has an error that both
must see: test_types.py takes the comment for `type: ignore`, and both say when one is
not needed.
"""

from __future__ import annotations

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvblock as kv

# What a dtype may be; what a spec may lack.
spec = kv.BlockSpec(4, 2, 16, 8, 64, "bfloat16")
by_name = kv.BlockSpec(
    num_layers=4, block_size=16, num_kv_heads=8, head_dim=64, dtype=np.float32
)
assert_type(spec.dtype.itemsize, int)
assert_type(kv.BlockSpec(4, 2, 16, 8, 64, jnp.bfloat16, "HND"), kv.BlockSpec)
kv.BlockSpec(4, 2, 16, 8, 64)  # wrong
kv.BlockSpec(4, 2, 16, 8, "64", np.dtype("int8"))  # wrong

# Arrays give arrays, lists give lists; NumPy's are arrays.
here = np.zeros((3, 4, 2, 16, 8, 64), np.float32)
there = jnp.asarray(here)
pieces = [[here[0, 0, 0], there[0, 0, 0]]]
assert_type(kv.block_to_universal(here, "NHD", spec=spec), jax.Array)
assert_type(kv.block_to_universal(pieces, num_outer=1), list[jax.Array])
assert_type(kv.universal_to_block(there), jax.Array)
assert_type(kv.universal_to_block([here]), list[list[jax.Array]])
assert_type(kv.block_to_operational(there, backend="kernel"), jax.Array)
assert_type(kv.block_to_operational(here, implementation="batch"), jax.Array)
assert_type(kv.block_to_operational(pieces), list[jax.Array])
assert_type(kv.operational_to_block(there, num_kv_heads=8, head_dim=64), jax.Array)
assert_type(kv.convert_blocks(here, "NHD", "HND", spec), jax.Array)
assert_type(kv.convert_blocks([here], "universal", "HND", spec), list[list[jax.Array]])
assert_type(kv.convert_blocks(pieces, "NHD", "universal", spec), list[jax.Array])
kv.block_to_universal("blocks")  # wrong
kv.block_to_universal(there).append(1)  # wrong

# Pools, ids in any form.
pool = kv.KVPool.zeros(spec, 8, device="cpu", contiguous=False)
ids = np.array([0, 1])
assert_type(kv.KVPool.wrap(here, spec), kv.KVPool)
assert_type(kv.KVPool.wrap([here, there], spec), kv.KVPool)
assert_type(kv.gather_blocks(pool, [0, 1], heads=(0, 4)), jax.Array)
assert_type(kv.gather_blocks(pool, range(2), spec.block_layout), jax.Array)
assert_type(kv.scatter_blocks(pool, ids, here), kv.KVPool)
assert_type(kv.copy_blocks(pool, [0], jnp.int32([1])), kv.KVPool)
assert_type(kv.transfer_blocks(pool, ids, pool, ids, heads=range(4)), kv.KVPool)
assert_type(kv.append_kv(pool, 0, here[0, 0, 0], None, [3]), kv.KVPool)
assert_type(kv.append_kv(pool, None, here[0], there[0], range(16)), kv.KVPool)
scales = kv.KVScales.zeros(spec, 8)
assert_type(kv.append_kv(pool, 0, here, here, ids, k_scale=0.5, v_scale=2), kv.KVPool)
WithScales = tuple[kv.KVPool, kv.KVScales]
assert_type(kv.append_kv(pool, 0, here, here, ids, scales=scales), WithScales)
Rotated = tuple[jax.Array, kv.KVPool]
assert_type(kv.rope_append(here, here, here, pool, 0, ids, ids, theta=1e4), Rotated)
assert_type(
    kv.rope_append(here, here, here, pool, 0, ids, None, cos_sin=there, scales=scales),
    tuple[jax.Array, kv.KVPool, kv.KVScales],
)
assert_type(kv.rope_append(here, None, None, pool, 0, ids, ids, theta=1e4), Rotated)
kv.rope_append(here, None, here, pool, 0, ids, ids, theta=1e4)  # wrong
kv.rope_append(here, here, None, pool, 0, ids, ids, theta=1e4)  # wrong
kv.rope_append(here, here, here, pool, 0, ids, ids, tetha=1e4)  # wrong
kv.append_kv(pool, 0, here, here, ids, scales=spec)  # wrong
assert_type(kv.gather_kv(pool, 0, [2, 5]), tuple[jax.Array, jax.Array | None])
assert_type(kv.gather_kv(pool, jnp.int32(1), ids)[0], jax.Array)
kv.gather_kv(pool, None, ids)  # wrong
kv.gather_kv(pool, 0, "ids")  # wrong
kv.append_kv(pool, "0", here, here, ids)  # wrong
kv.gather_blocks(pool, "ids")  # wrong
kv.gather_blocks(spec, ids)  # wrong


def step(pool: kv.KVPool, count: int) -> tuple[kv.KVPool, int]:
    return pool, count


# Objects.
kv.BlockManager(4, 16, 8, dtype=3)  # wrong
with kv.BlockManager(
    4, 16, num_kv_heads=8, head_dim=64, num_blocks=8, dtype="float32"
) as manager:
    blocks = manager.allocate_blocks(2)
    assert_type(kv.gather_blocks(manager.pool, blocks), jax.Array)
    assert_type(blocks[0], kv.Block)
    assert_type(blocks[:1], kv.BlockList)
    assert_type([layer for block in blocks for layer in block], list[kv.Layer])
    blocks[0].copy_from(here[0])
    blocks["0"]  # wrong

    more = manager.allocate_blocks(1)
    blocks.append(more[0])
    blocks.extend(more)
    assert_type(blocks + more, kv.BlockList)
    assert_type(blocks.slots(0, 20), np.ndarray)
    layer = blocks[0][0]
    assert_type([layer.k, layer.v, layer[0]], list[kv.Piece])
    manager.update(kv.copy_blocks, blocks, more.ids, implementation="kernel")
    kv.append_kv(manager.pool, 0, here[0, 0, 0], layer.v, blocks.slots(0, 16))
    kv.gather_kv(manager.pool, 0, blocks)
    blocks.append(more)  # wrong
    blocks.extend([0])  # wrong
    blocks.slots("0", 1)  # wrong
    assert_type(manager.update(step, 3), int)
    assert_type(blocks[0].manager.update(step, 3), int)
    assert_type(blocks[0].manager.allocate_blocks(1), kv.BlockList)
    assert_type(blocks.ids, np.ndarray)
    blocks[0].copy_from(layer)
    blocks[0].copy_from("block")  # wrong
    manager.update("step")  # wrong
    manager.update(len)  # wrong

assert_type(kv.BlockManager.from_spec(spec, 8, device="cpu"), kv.BlockManager)
assert_type(kv.BlockManager.from_pool(pool), kv.BlockManager)
kv.BlockManager.from_pool(spec)  # wrong

# Attention: what comes back is what was asked for.
q = np.ones((1, 8, 2, 16), np.float32)
flag = bool(ids[0])
Pair = tuple[jax.Array, jax.Array]
assert_type(kv.flash_attention(q, q, q, causal=True, q_lens=[8]), jax.Array)
kv.flash_attention(q, q, q, segment_ids=[[0] * 8])
kv.flash_attention(q, q, q, segment_ids=(ids, [[0] * 8]))
assert_type(kv.flash_attention(q, q, q, return_lse=True, scale=1.0), Pair)
assert_type(kv.flash_attention(q, q, q, return_lse=flag), jax.Array | Pair)
assert_type(kv.dot_product_attention(q, q, q, is_causal=True), jax.Array)
assert_type(kv.dot_product_attention(q, q, q, mask=q > 0, return_residual=True), Pair)
assert_type(kv.attention_fn(there, there, there), jax.Array)
assert_type(kv.flash_attention_forward(q, q, q, Bc=64), jax.Array)
Residuals = tuple[jax.Array, jax.Array, jax.Array]
assert_type(kv.flash_attention_forward(q, q, q, return_residuals=True), Residuals)
assert_type(kv.flash_attention_backward(q, q, q, q, q, q, q), Residuals)
assert_type(kv.FlashAttention(64, 64)(q, q, q), jax.Array)
assert_type(
    kv.FlashAttention(64, 64).forward(q, q, q, return_residuals=True), Residuals
)
kv.flash_attention(q, q, q, casual=True)  # wrong
kv.flash_attention(q, q, q, window=3)  # wrong
kv.flash_attention(q, q, "v")  # wrong

# Paged attention: what rows see are arrays or lists.
pages = there[0, 0, 0], there[0, 0, 1]
paged = kv.paged_attention
assert_type(paged(q, pages, None, [[0]], [8], ranges=[[[0, 8]] * 8]), jax.Array)
assert_type(
    paged(q, pages, None, [[0]], [8], tree_mask=ids.astype(np.uint32), return_lse=True),
    Pair,
)
paged(q, pages, None, [[0]], [8], tree_mask="1")  # wrong
paged(q, pages, None, [[0]], [8], ranges=8)  # wrong

# Drop-ins have their owners' types.
rows, new, three = q[0], there, np.zeros(3, np.int32)
v3 = kv.dropins.rpa_v3.ragged_paged_attention
assert_type(v3(rows, new, new, here, three, three, three, three), Pair)
assert_type(v3(rows, new, new, here, three, three, three, three, sm_scale=0.1), Pair)
v3(rows, new, new, here, three, three, three)  # wrong
v3(rows, new, new, here, three, three, three, three, sliding_window="8")  # wrong
unified = kv.dropins.ejkernel.unified_attention
assert_type(unified(rows, new, new, three, three, three, causal=True), jax.Array)
unified(queries=rows)  # wrong
