"""The examples' own kernels, their CUDA source run as it is where there is no GPU.

Each is held to a truth in NumPy and float64, not to its fallback alone.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_kernels import INSTRUCTIONS, SHARED, emulate

import jax_kvblock as kv
from jax_kvblock import kernels

EXAMPLES = Path(__file__).parents[2] / "examples"
PRELUDE = f"""
{INSTRUCTIONS}
{SHARED}
inline unsigned AndOr(unsigned a, unsigned b, unsigned c) {{ return (a & b) | c; }}
"""


@pytest.fixture
def where(everywhere, request):
    if everywhere == "emulator":
        request.getfixturevalue("examples_run")
    return everywhere


@pytest.fixture(scope="session")
def examples_run(kernel_handlers, tmp_path_factory):
    """The driver that stands in knows the examples' kernels."""

    def run(name, *made, prelude=""):
        source = (EXAMPLES / f"{name}.cu").read_text()
        emulate(kernel_handlers, tmp_path_factory, name, source, *made, prelude=prelude)

    of_w4a16 = [
        kernels.from_cuda(EXAMPLES / "w4a16.cu", f"w4a16<{bands}, {eights}>")
        for bands in (1, 2)
        for eights in (1, 2)
    ]
    run("w4a16", *of_w4a16, prelude=PRELUDE)
    run("quantize_blocks", quantizer(64), prelude="#define DIM 64\n#include <cmath>")


def quantizer(dim):
    path = EXAMPLES / "quantize_blocks.cu"
    return kernels.from_cuda(path, "quantize_blocks", options=[f"-DDIM={dim}"])


@pytest.fixture
def example(monkeypatch):
    def load(name):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


# ---- w4a16 ---------------------------------------------------------------------------


def numbers_of(words):
    """uint32 [K / 32, N / 32, 32, 4] as numbers [K, N], by the text of w4a16.cu."""
    bands, columns = words.shape[:2]
    numbers = np.zeros((bands * 32, columns * 32), np.int64)
    for b, c, lane, tile in np.ndindex(words.shape):
        column = 32 * c + 8 * tile + lane // 4
        for i in range(8):
            shift = 4 * (i // 2) + 16 * (i % 2)
            number = int(words[b, c, lane, tile]) >> shift & 15
            numbers[32 * b + 8 * (lane % 4) + i, column] = number
    return numbers


def test_weights_in_four_bits(example, rng):
    w4a16 = example("w4a16")
    w = rng.standard_normal((256, 64)).astype(np.float32)
    w[:128, 5] = 0
    weights = w4a16.quantize(jnp.asarray(w))
    assert weights.words.dtype == jnp.uint32
    scales = np.asarray(weights.scales, np.float64)
    back = (numbers_of(np.asarray(weights.words)) - 8) * np.repeat(scales, 128, axis=0)
    np.testing.assert_allclose(w4a16.dequantize(weights), back, rtol=1e-6)
    off = np.abs(back - w) / np.repeat(scales, 128, axis=0)
    assert off.max() < 0.501


@pytest.mark.parametrize("rows", [1, 7, 8, 13, 16])
@pytest.mark.parametrize("bands", [1, 2])
@pytest.mark.parametrize("groups", [1, 17, 37])
def test_w4a16(where, example, rng, monkeypatch, rows, bands, groups):
    """Groups of 128 rows, not as many for each of 16 warps; 37 go round the ring."""
    w4a16 = example("w4a16")
    monkeypatch.setattr(w4a16, "MANY_COLUMNS", 64 if bands == 2 else 2**30)
    k, n = groups * 128, 128 if bands == 2 else 96
    words = rng.integers(0, 2**32, (k // 32, n // 32, 32, 4), np.uint32)
    scales = rng.uniform(0.5, 2, (k // 128, n)).astype(np.float32)
    x = jnp.asarray(rng.standard_normal((rows, k)), jnp.bfloat16)
    got = w4a16.product(x, w4a16.Weights(jnp.asarray(words), jnp.asarray(scales)))
    w = (numbers_of(words) - 8) * np.repeat(scales.astype(np.float64), 128, axis=0)
    want = np.asarray(x, np.float64) @ w
    assert got.shape == want.shape and got.dtype == jnp.bfloat16
    # Rounded once to 8 bits, from sums in float32.
    sums = np.abs(np.asarray(x, np.float64)) @ np.abs(w)
    wrong = np.abs(np.asarray(got, np.float64) - want)
    assert (wrong <= 2**-8 * np.abs(want) + 1e-5 * sums).all()


def test_w4a16_says_what_it_takes(example):
    w4a16 = example("w4a16")
    weights = w4a16.quantize(jnp.ones((128, 32)))
    with pytest.raises(ValueError, match=r"bfloat16 \[M, 128\] with M at most 16, got"):
        w4a16.product(jnp.ones((17, 128), jnp.bfloat16), weights)


# ---- quantize_blocks -----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_quantize_blocks(where, example, rng, layout):
    spec = kv.BlockSpec(2, 2, 3, 2, 64, jnp.bfloat16, layout)
    data = rng.standard_normal((6, *spec.block_shape))
    data[2, 0, 1, 0] = 0  # a row of zeros has a scale of 0
    data[4] *= 1e-30
    pool = kv.KVPool.wrap(jnp.asarray(data, jnp.bfloat16), spec)
    ids = jnp.asarray([5, 2, 2, -1, 4, 6, 0], jnp.int32)
    rows, scales = jax.jit(example("quantize_blocks").quantize_blocks)(pool, ids)
    exact = np.asarray(pool.data, np.float64)
    known = (np.asarray(ids) >= 0) & (np.asarray(ids) < 6)
    want = np.where(known.reshape(-1, 1, 1, 1, 1, 1), exact[np.asarray(ids) % 6], 0)
    largest = np.abs(want).max(axis=-1)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    assert rows.dtype == jnp.int8 and (np.abs(np.asarray(rows, int)) <= 127).all()
    back = np.asarray(rows, np.float64) * np.asarray(scales, np.float64)[..., None]
    half = np.asarray(scales, np.float64)[..., None] * 0.501
    assert (np.abs(back - want) <= half).all()
    assert not np.asarray(rows)[~known].any()


def test_quantize_blocks_says_what_it_takes(example):
    spec = kv.BlockSpec(1, 2, 4, 1, 32, jnp.bfloat16)
    pool = kv.KVPool.zeros(spec, 2)
    with pytest.raises(ValueError, match="head_dim must be 64, 128, 256, got 32"):
        example("quantize_blocks").quantize_blocks(pool, jnp.zeros(1, jnp.int32))
