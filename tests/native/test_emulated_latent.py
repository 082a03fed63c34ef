"""Attention over latent caches on a CPU, thread by thread, against float64.

As test_emulated_paged.py. A value is the first columns of its key, so that a tile in
shared memory is both; each shape of the kernel has a GPU here, and so has Hopper's.
"""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from latent_cases import (
    LATENT,
    LATENT_MANY,
    LATENT_PAIRS,
    MANY_ROWS,
    WIDE_LATENT,
)
from paged_problems import (
    Case,
    HostMemory,
    Problem,
    hold_alone,
    run_on_host,
    with_nan_in_front_of_windows,
)

from jax_kvblock import BlockSpec, KVPool, paged_attention

# Multiprocessors, and bytes of shared memory that a CTA can have: those of an H200, of
# an A100, of a consumer GPU.
H200, A100, CONSUMER = 232448, 166912, 101376


@pytest.fixture
def emulated(latent_library: Path):
    loaded = ctypes.CDLL(str(latent_library))
    yield loaded
    on(loaded, 3, H200)


def on(
    library: ctypes.CDLL, multiprocessors: int, shared: int, hopper: bool = False
) -> None:
    """hopper: with its own kernel, where that serves; else the generic one alone."""
    library.emulator_set_multiprocessors(multiprocessors)
    library.emulator_set_cta_bytes(shared)
    library.emulator_set_hopper(hopper)
    library.emulator_hopper_ctas()
    library.emulator_clustered_ctas()


@pytest.mark.wide
@pytest.mark.parametrize("name", LATENT)
def test_every_row_is_right(name, emulated):
    """By one CTA each, and by more CTAs than units, which are cut then."""
    case = LATENT[name]
    gpus = [(3, CONSUMER)] if case.head_dim == 192 else [(3, H200), (7, A100)]
    x = Problem(case)
    for multiprocessors, shared in gpus:
        on(emulated, multiprocessors, shared)
        run_on_host(emulated, x, times=1)


@pytest.mark.wide
def test_the_same_bits_every_time(emulated):
    on(emulated, 20, H200)
    run_on_host(emulated, Problem(LATENT["latent: shares that cut units"]), times=2)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["latent: a split", "latent: d192, drafts, a split"])
def test_with_split_size_other_sequences_change_no_bit(name, emulated):
    hold_alone(emulated, Problem(LATENT[name]))


@pytest.mark.wide
def test_keys_in_front_of_all_windows_may_be_nan(emulated):
    case = Case(window=(70, 0), sequences=((1, 300), (5, 133), (1, 9)), **WIDE_LATENT)
    for multiprocessors, shared in ((3, H200), (7, A100)):
        on(emulated, multiprocessors, shared)
        run_on_host(emulated, with_nan_in_front_of_windows(case), times=1)


@pytest.mark.wide
def test_each_call_may_have_a_layer_of_its_own(emulated):
    """A layer for each call, as vmap makes them."""
    case = LATENT["latent: several calls"]
    x = Problem(case)
    x.layers = [1, 7]
    x.kv_lens[len(x.kv_lens) // 2 :] = 0
    run_on_host(emulated, x, times=1)


# ---- Hopper's kernel -----------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.parametrize("name", LATENT_MANY)
def test_many_rows_on_hopper(name, emulated):
    """By CTAs with several pieces each, and by more CTAs than units."""
    x = Problem(LATENT_MANY[name])
    for multiprocessors in (1, 3, 11):
        on(emulated, multiprocessors, H200, hopper=True)
        run_on_host(emulated, x, times=1)
        assert emulated.emulator_hopper_ctas() > 0


@pytest.mark.wide
@pytest.mark.parametrize("length", [1, 64, 65, 128, 129, 192, 193, 256, 320])
def test_pieces_of_any_number_of_tiles(length, emulated):
    """Two sequences by one CTA: the second begins with either place for a tile."""
    on(emulated, 1, H200, hopper=True)
    case = Case(sequences=((1, length), (1, 130)), **{**MANY_ROWS, "heads": 64})
    run_on_host(emulated, Problem(case), times=1)
    assert emulated.emulator_hopper_ctas() == 1


@pytest.mark.wide
def test_the_same_bits_every_time_on_hopper(emulated):
    on(emulated, 11, H200, hopper=True)
    x = Problem(LATENT_MANY["latent, many rows: 40 heads, several queries"])
    run_on_host(emulated, x, times=2)


@pytest.mark.wide
def test_with_split_size_other_sequences_change_no_bit_on_hopper(emulated):
    on(emulated, 3, H200, hopper=True)
    hold_alone(emulated, Problem(LATENT_MANY["latent, many rows: a split"]))
    assert emulated.emulator_hopper_ctas() > 0


@pytest.mark.wide
def test_keys_in_front_of_all_windows_may_be_nan_on_hopper(emulated):
    sequences = ((1, 300), (5, 133), (1, 9), (1, 135))
    case = Case(window=(70, 0), sequences=sequences, **{**WIDE_LATENT, "heads": 32})
    for multiprocessors in (1, 7):
        on(emulated, multiprocessors, H200, hopper=True)
        run_on_host(emulated, with_nan_in_front_of_windows(case), times=1)
        assert emulated.emulator_hopper_ctas() > 0


@pytest.mark.wide
def test_each_call_may_have_a_layer_of_its_own_on_hopper(emulated):
    on(emulated, 3, H200, hopper=True)
    x = Problem(LATENT_MANY["latent, many rows: several calls"])
    x.layers = [1, 7]
    x.kv_lens[len(x.kv_lens) // 2 :] = 0
    run_on_host(emulated, x, times=1)
    assert emulated.emulator_hopper_ctas() > 0


# ---- clusters of two, for two tiles of rows each -------------------------------------


@pytest.mark.wide
@pytest.mark.parametrize("name", LATENT_PAIRS)
def test_pairs_of_tiles_by_clusters(name, emulated):
    """By one cluster, by some with several pieces each, by more of them than units."""
    x = Problem(LATENT_PAIRS[name])
    for multiprocessors in (2, 7, 40):
        on(emulated, multiprocessors, H200, hopper=True)
        run_on_host(emulated, x, times=1)
        clustered = emulated.emulator_clustered_ctas()
        assert 0 < clustered <= multiprocessors
        assert clustered == emulated.emulator_hopper_ctas()


@pytest.mark.wide
@pytest.mark.parametrize("length", [1, 64, 65, 128, 129, 192, 193, 256, 320])
def test_pieces_of_any_number_of_tiles_by_clusters(length, emulated):
    on(emulated, 2, H200, hopper=True)
    case = Case(sequences=((1, length), (1, 130)), **MANY_ROWS)
    run_on_host(emulated, Problem(case), times=1)
    assert emulated.emulator_clustered_ctas() == 2


@pytest.mark.wide
def test_the_same_bits_every_time_by_clusters(emulated):
    on(emulated, 22, H200, hopper=True)
    run_on_host(emulated, Problem(LATENT_PAIRS["latent, pairs: 72 heads"]), times=2)
    assert emulated.emulator_clustered_ctas() > 0


@pytest.mark.wide
def test_with_split_size_other_sequences_change_no_bit_by_clusters(emulated):
    on(emulated, 3, H200, hopper=True)
    hold_alone(emulated, Problem(LATENT_PAIRS["latent, pairs: a split"]))
    assert emulated.emulator_clustered_ctas() > 0


@pytest.mark.wide
def test_keys_in_front_of_all_windows_may_be_nan_by_clusters(emulated):
    sequences = ((1, 300), (5, 133), (1, 9), (1, 135))
    case = Case(window=(70, 0), sequences=sequences, **{**WIDE_LATENT, "heads": 72})
    for multiprocessors in (2, 14):
        on(emulated, multiprocessors, H200, hopper=True)
        run_on_host(emulated, with_nan_in_front_of_windows(case), times=1)
        assert emulated.emulator_clustered_ctas() > 0


@pytest.mark.wide
@pytest.mark.parametrize(
    ("heads", "queries", "split_size"),
    [(64, 1, 0), (60, 2, 0), (20, 6, 0), (64, 4, 256)],
)
def test_where_a_cta_is_alone(heads, queries, split_size, emulated):
    """Sequences have less than two tiles; with a split, a query's heads tell."""
    on(emulated, 4, H200, hopper=True)
    case = Case(
        sequences=((queries, 70), (queries, 20)),
        split_size=split_size,
        **{**MANY_ROWS, "heads": heads},
    )
    run_on_host(emulated, Problem(case), times=1)
    assert emulated.emulator_clustered_ctas() == 0
    assert emulated.emulator_hopper_ctas() > 0


# ---- what Hopper's kernel does not serve ---------------------------------------------


@pytest.mark.wide
@pytest.mark.parametrize(
    "name",
    [
        "decode",  # 16 rows
        "20 heads, blocks of 5",
        "a window, a softcap, sinks",
        "a scale below 0",
        "an array for each layer",
        "ranges and drafts",
        "d192, 20 heads",
    ],
)
def test_what_the_generic_kernel_has_on_hopper(name, emulated):
    case = LATENT[f"latent: {name}"]
    if name == "an array for each layer":
        case = dataclasses.replace(case, heads=32)
    if name == "a scale below 0":
        case = dataclasses.replace(case, heads=64)
    on(emulated, 3, H200, hopper=True)
    run_on_host(emulated, Problem(case), times=1)
    assert emulated.emulator_hopper_ctas() == 0


def test_a_gpu_with_too_little_shared_memory_says_so(emulated):
    on(emulated, 3, CONSUMER)
    memory = HostMemory()
    x = Problem(LATENT["latent: decode"])  # it holds the addresses of the arrays
    a = x.describe(memory.give)
    a.o = a.lse = a.workspace = memory.give(Problem(Case()).q)
    launch = emulated.kvblock_paged_attention_forward
    launch.restype = ctypes.c_char_p
    assert b"a latent cache of head dim 576 needs 152 KiB" in launch(
        ctypes.byref(a), None
    )


# ---- from JAX ------------------------------------------------------------------------


def both(**given: Any) -> None:
    """The kernel's result is plain JAX's."""
    kernel, plain = (
        jax.jit(
            lambda name: paged_attention(**given, implementation=name, return_lse=True),
            static_argnums=0,
        )(name)
        for name in ("cuda", "xla")
    )
    for got, want in zip(kernel, plain, strict=True):
        got, want = (np.asarray(a, np.float64) for a in (got, want))
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


def drawn(rng: np.random.Generator, **changes: Any) -> dict[str, Any]:
    """Three sequences over five blocks of 16."""
    given = {
        "q": rng.standard_normal((6, 4, 192)).astype(np.float16),
        "pages": rng.standard_normal((5, 16, 192)).astype(np.float16),
        "layer": None,
        "block_tables": np.array([[4, 0], [2, -1], [3, 1]], np.int32),
        "kv_lens": np.array([20, 5, 31], np.int32),
        "query_start": np.array([0, 1, 4, 5], np.int32),
        "value_dim": 128,
    }
    return given | changes


def pool_of(pages: np.ndarray, layout: str, contiguous: bool) -> KVPool:
    """The pages as the second of three layers."""
    spec = BlockSpec(3, 1, 16, 1, 192, "float16", layout=layout)
    blocks = np.full((5, 3, 1, 16, 1, 192), np.nan, np.float16)
    blocks[:, 1, 0, :, 0] = pages
    order = "".join(axis for group in spec.block_layout.groups for axis in group)
    data = jnp.asarray(blocks.transpose(0, *(1 + "LOTHD".index(a) for a in order)))
    return KVPool(data if contiguous else tuple(data[:, i] for i in range(3)), spec)


def test_jax_calls_the_kernel_with_pages(latent_as_cuda, rng):
    sinks = jnp.asarray(rng.standard_normal(4), jnp.float32)
    both(**drawn(rng, sinks=sinks, softcap=3.0, window=(20, None), scale=0.1))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("layout", "contiguous"), [("NHD", True), ("HND", False), ("universal", True)]
)
def test_jax_calls_the_kernel_with_pools(
    layout, contiguous, traced, latent_as_cuda, rng
):
    given = drawn(rng)
    pool = pool_of(given["pages"], layout, contiguous)
    both(**given | {"pages": pool, "layer": jnp.int32(1) if traced else 1})


def test_jax_calls_the_kernel_under_vmap(latent_as_cuda, rng):
    given = drawn(rng)
    of = {n: np.stack([given[n], given[n][::-1]]) for n in ("q", "pages")}

    def run(name: str) -> Any:
        return jax.vmap(lambda x: paged_attention(**given | x, implementation=name), 0)(
            of
        )

    got, want = (np.asarray(run(name), np.float64) for name in ("cuda", "xla"))
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


UNSERVED = {
    "another head dim": (
        {"value_dim": 64},
        r"a latent cache of head dim 192 with value_dim 64 \(576 with 512, 192 with",
    ),
    "8 bits": (
        {"pages": np.zeros((5, 16, 192), np.int8)},
        "a latent cache of int8 with q float16",
    ),
    "float32": (
        {
            "q": np.zeros((6, 4, 192), np.float32),
            "pages": np.zeros((5, 16, 192), np.float32),
        },
        "dtype float32",
    ),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_the_kernel_does_not_serve(name, latent_as_cuda, rng):
    """It is told where the kernel is asked for, and plain JAX takes it otherwise."""
    changes, message = UNSERVED[name]
    given = drawn(rng, **changes)
    with pytest.raises(ValueError, match=f"'cuda' does not serve {message}"):
        jax.jit(lambda: paged_attention(**given, implementation="cuda")).lower()
    text = jax.jit(lambda: paged_attention(**given)).lower().as_text()
    assert "kvblock_paged_attention" not in text
