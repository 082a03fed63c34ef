"""The append kernel on a CPU, thread by thread, against float64.

As in test_emulated.py: the very sources that a GPU runs, launcher too. The cases are
those of the tests of the package.
"""

from __future__ import annotations

import ctypes
import mmap

import jax.numpy as jnp
import numpy as np
import pytest
from append_cases import CASES, KEPT, MANY, MANY_KEPT, Case, Drawn
from append_launches import NUMBERS, CAppend, Guarded, launch


@pytest.mark.parametrize("skew", [False, True], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("name", CASES)
def test_rope_append(name, skew, emulated, rng):
    """In vectors, and one by one where an address is not a multiple of 16."""
    drawn = Drawn(CASES[name], rng)
    drawn.hold(*launch(emulated, drawn, True, Guarded(skew)))


@pytest.mark.parametrize("skew", [False, True], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("name", KEPT)
def test_append_kv(name, skew, emulated, rng):
    drawn = Drawn(KEPT[name], rng)
    drawn.hold(*launch(emulated, drawn, False, Guarded(skew)), turns=False)


@pytest.mark.parametrize("skew", [False, True], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("name", [*MANY, *MANY_KEPT])
def test_many_tokens(name, skew, emulated, rng):
    case = (MANY | MANY_KEPT)[name]
    drawn = Drawn(case, rng)
    made = launch(emulated, drawn, name in MANY, Guarded(skew))
    drawn.hold(*made, turns=name in MANY)


@pytest.mark.parametrize("block_size", [16, 2500])
def test_a_prompt_that_fills_its_blocks_in_order(block_size, emulated, rng):
    """Zeros follow the last token alone; nobody has to look for the others' slots."""
    case = MANY["pairs, computed, zeros behind"]
    blocks = 2 + case.tokens // block_size
    drawn = Drawn(case.replaced(block_size=block_size, blocks=blocks), rng)
    token = np.arange(case.tokens)
    block = rng.permutation(blocks)[token // block_size]
    drawn.slots = np.int32(block * block_size + token % block_size)
    drawn.hold(*launch(emulated, drawn, True, Guarded()))


def test_slots_beyond_a_window_are_cleared_but_for_those_written(emulated, rng):
    """Blocks of more slots than a CTA looks through at a time."""
    case = Case(
        zero_tail=True, block_size=5000, blocks=2, tokens=60, dim=4, dtype="float16"
    )
    drawn = Drawn(case, rng)
    drawn.slots[:4] = [5000, 0, 4999, 2048]  # both begin
    drawn.slots[4:] = rng.permutation(np.arange(5001, 10000))[:56]
    drawn.hold(*launch(emulated, drawn, True, Guarded()))


def test_what_is_stored_as_it_came_keeps_its_bits(emulated, rng):
    """NaNs of every kind, in v and in a k that nothing turns."""
    for dtype in ("bfloat16", "float16", "float32"):
        drawn = Drawn(Case(dtype=dtype, angles=None, dim=24), rng)
        for name in ("q", "k", "v"):
            x = getattr(drawn, name)
            bits = rng.integers(0, 256, (x.nbytes,), np.uint8)
            setattr(drawn, name, bits.view(x.dtype).reshape(x.shape))
        q, blocks, _ = launch(emulated, drawn, True, Guarded())
        assert q.tobytes() == drawn.q.tobytes()
        for token, (block, offset) in drawn.places().items():
            for outer, x in enumerate((drawn.k, drawn.v)):
                got = blocks[block, 1, outer, offset]
                assert got.tobytes() == x[token].tobytes()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_cache_of_more_than_an_int32_of_elements(layer, emulated, rng):
    """5 GB, of which two pages are ever touched: the last block of a layer, or not."""
    heads, dim, block, size = 2, 64, 2 * 2 * 16 * 2 * 64, 16  # of two layers, K and V
    blocks = 5 * 10**9 // block
    unreserved = getattr(mmap, "MAP_NORESERVE", 0x4000)
    room = mmap.mmap(-1, blocks * block, flags=mmap.MAP_PRIVATE | unreserved)
    cache = np.frombuffer(room, np.uint8)
    k = rng.integers(-8, 9, (1, heads, dim)).astype(np.float32)
    slots = np.array([blocks * size - 1], np.int32)
    one = np.float32([1])
    a = CAppend(dtype=NUMBERS["float32"], cache_dtype=NUMBERS["int8"], tokens=1)
    a.num_kv_heads, a.head_dim, a.num_outer, a.layers = heads, dim, 2, 1
    a.k = a.v = k.ctypes.data
    a.slots, a.k_scale, a.v_scale = slots.ctypes.data, one.ctypes.data, one.ctypes.data
    a.k_scale_heads = a.v_scale_heads = 1
    a.buffers = (ctypes.c_void_p * 1)(cache.ctypes.data)
    a.num_buffers, a.buffer_bytes = 1, cache.nbytes
    a.num_layers, a.num_blocks, a.block_size, a.layer = 2, blocks, size, layer
    a.layer_stride, a.block_stride, a.outer_stride = block // 2, block, block // 4
    a.token_stride, a.head_stride, a.dim_stride = heads * dim, dim, 1
    a.q_norm_dtype = a.k_norm_dtype = a.dtype
    assert emulated.kvblock_append_cuda(ctypes.byref(a), None) is None
    last = cache[-block:].view(np.int8).reshape(2, 2, size, heads, dim)
    np.testing.assert_array_equal(last[layer, :, -1], np.stack([k[0]] * 2))
    assert not last[:, :, :-1].any() and not last[1 - layer].any()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_conversions_are_those_of_the_dtype(dtype, emulated):
    """Every number of the dtype, every tie, what lies beside these, and far numbers."""
    codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float64)
    grid = np.unique(codes[np.isfinite(codes)])
    middles = (grid[1:] + grid[:-1]) / 2
    near = [middles * (1 + s) for s in (-(2**-20), 0, 2**-20)]
    x = np.float32(np.concatenate([grid, *near, [np.inf, -np.inf, 1e38, 1e-45, -0.0]]))
    got = [emulated.emulator_pair_of(NUMBERS[dtype], a, -a) for a in x]
    limits = (-128, 127) if dtype == "int8" else (-grid.max(), grid.max())
    for code, y in ((np.uint16(got) & 255, x), (np.uint16(got) >> 8, -x)):
        held = np.clip(y, *limits)
        want = (np.rint(held) if dtype == "int8" else held).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(code.astype(np.uint8), want.view(np.uint8))
    nan = emulated.emulator_pair_of(NUMBERS[dtype], np.nan, 1.0)
    low = np.uint8([nan & 255]).view(jnp.dtype(dtype)).astype(np.float32)
    assert low == 0 if dtype == "int8" else np.isnan(low)


def test_angles_are_exact_far_beyond_float32(emulated, rng):
    cosine, sine = ctypes.c_float(), ctypes.c_float()
    worst = {2**20: 0.0, 2**31: 0.0}
    for position in np.r_[0, 1, 2**20, 2**31 - 1, 2 ** rng.uniform(0, 31, 400)]:
        frequency = np.float32(10 ** rng.uniform(-6, 0))
        of = (ctypes.c_int(int(position)), ctypes.c_float(frequency))
        emulated.emulator_cos_sin(*of, ctypes.byref(cosine), ctypes.byref(sine))
        angle = float(int(position)) * float(frequency)
        error = abs(cosine.value - np.cos(angle)) + abs(sine.value - np.sin(angle))
        bound = 2**20 if position <= 2**20 else 2**31
        worst[bound] = max(worst[bound], error)
    assert worst[2**20] < 5e-7
    assert worst[2**31] < 1e-5


# ---- from JAX, through the FFI handler -----------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_rope_append_in_jax(name, as_cuda, rng):
    """The call that a GPU gets, decoded, checked and launched."""
    drawn = Drawn(CASES[name], rng)
    q, pool, scales = drawn.rope_append()
    drawn.hold(q, pool, scales and (scales.k, scales.v))


@pytest.mark.parametrize("name", KEPT)
def test_append_kv_in_jax(name, as_cuda, rng):
    drawn = Drawn(KEPT[name], rng)
    _, pool, scales = drawn.append_kv()
    drawn.hold(None, pool, scales and (scales.k, scales.v), turns=False)
