"""Ragged drop-ins against float64, and against their owners' references in JAX."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    ragged_paged_attention as jax_ragged_paged_attention,
)
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    ref_ragged_paged_attention,
)
from ragged import Ragged
from settings import SETTINGS

from jax_kvblock import dropins

BARS = {"float32": 1e-5, "bfloat16": 4e-2}


def run_v2(d: Ragged, sm_scale: float = 1.0, **options: Any) -> tuple[Any, None]:
    cache = d.by_turns(d.full, None)
    out = dropins.rpa_v2.ragged_paged_attention(
        d.q,
        cache,
        d.kv_lens,
        d.tables,
        d.starts,
        np.array([d.count]),
        sm_scale=sm_scale,
        **options,
    )
    return out, None


def run_ejkernel(
    d: Ragged, sm_scale: float = 1.0, soft_cap: Any = None, **options: Any
) -> tuple[Any, None]:
    sinks = options.pop("sinks", None)
    n = d.count
    out = dropins.ejkernel.unified_attention(
        d.q,
        *d.pair(d.full),
        d.kv_lens[:n],
        d.tables[:n],
        d.starts[: n + 1],
        None,
        None,
        sinks,
        softmax_scale=sm_scale,
        logits_soft_cap=soft_cap,
        **options,
    )
    return out, None


def step(d: Ragged, cache: Any) -> tuple[Any, ...]:
    """What the functions take that append."""
    distribution = np.array([1, 2, d.count], np.int32)
    return (
        d.q,
        *d.new,
        cache,
        d.kv_lens,
        d.tables.reshape(-1),
        d.starts,
        distribution,
    )


def run_v3(d: Ragged, **options: Any) -> tuple[Any, Any]:
    cache = d.by_turns(d.ahead, 4)
    out, cache = dropins.rpa_v3.ragged_paged_attention(*step(d, cache), **options)
    return out, d.unpacked(cache, True)


def run_hd64(d: Ragged, **options: Any) -> tuple[Any, Any]:
    sinks = options.pop("sinks", None)
    cache = d.in_rows(d.ahead, 2)
    run = dropins.rpa_v3_hd64.ragged_paged_attention_hd64
    out, cache = run(*step(d, cache), sinks, **options)
    return out, d.unpacked(cache, False)


def run_tokamax(d: Ragged, **options: Any) -> tuple[Any, Any]:
    cache = d.by_turns(d.ahead, None)
    run = dropins.tokamax.ragged_paged_attention
    out, cache, lse = run(*step(d, cache), return_lse=True, **options)
    assert lse.shape == out.shape[:2]
    return out, d.unpacked(cache, True)


def run_sglang(d: Ragged, **options: Any) -> tuple[Any, Any]:
    """Tables of their own lengths, in another order than their sequences have."""
    sinks = options.pop("sinks", None)
    cache = d.by_turns(d.ahead, 2)
    *ahead, _, starts, distribution = step(d, cache)
    pages, begins = own_tables(d)
    out, cache = dropins.sglang.ragged_paged_attention(
        *ahead, pages, starts, begins, distribution, None, sinks, **options
    )
    return out, d.unpacked(cache, True)


def own_tables(d: Ragged) -> tuple[np.ndarray, np.ndarray]:
    """page_indices and cu_kv_lens of sglang; the last two belong to nobody."""
    counts = [-(-n // d.page) for _, n in d.sequences]
    pages = [d.tables[b, :n] for b, n in enumerate(counts)]
    begins = d.page * np.cumsum([0, *counts, 40, -90])
    return np.concatenate(pages), begins.astype(np.int32)


RUNS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "v2": run_v2,
    "v3": run_v3,
    "hd64": run_hd64,
    "tokamax": run_tokamax,
    "sglang": run_sglang,
    "ejkernel": run_ejkernel,
}
WITH_SINKS = ("hd64", "sglang", "ejkernel")


def hold(d: Ragged, made: tuple[Any, Any], dtype: str = "float32", **truth: Any) -> Any:
    out, cache = made
    bar = BARS[dtype] * (truth.get("v_scale") or 1.0)
    want, _ = d.truth(**truth)
    assert out.dtype == dtype and out.shape == want.shape
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=0, atol=bar)
    if cache is not None:  # the new keys are there, and nothing else has changed
        same_bits(cache, d.full)


def same_bits(x: np.ndarray, y: np.ndarray) -> None:
    bits = f"uint{8 * x.dtype.itemsize}"
    np.testing.assert_array_equal(x.view(bits), y.view(bits))


@pytest.mark.parametrize("owner", RUNS)
def test_every_row_is_right(owner, rng):
    """Scores are q·k unless a scale is given."""
    d = Ragged(rng)
    hold(d, RUNS[owner](d))


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("owner", RUNS)
def test_a_window_counts_the_query_itself(owner, window, rng):
    d = Ragged(rng, ((1, 37), (20, 20), (1, 1)))
    made = RUNS[owner](d, sm_scale=0.3, sliding_window=window, soft_cap=2.0)
    hold(d, made, scale=0.3, window=window, soft_cap=2.0)


@pytest.mark.parametrize("owner", WITH_SINKS)
def test_sinks_are_scores_without_values(owner, rng):
    d = Ragged(rng)
    made = RUNS[owner](d, sm_scale=0.3, soft_cap=2.0, sinks=d.sinks)
    hold(d, made, scale=0.3, soft_cap=2.0, sinks=True)


SCALES = {"sm_scale": 0.3, "k_scale": 0.5, "v_scale": 3.0}


NARROW = [(owner, "float8_e4m3fn") for owner in ("v2", "hd64", "tokamax", "sglang")]
NARROW += [("v3", dtype) for dtype in ("bfloat16", "float8_e5m2", "int8")]


@pytest.mark.parametrize(("owner", "dtype"), NARROW)
def test_caches_of_8_bits_and_their_scales(owner, dtype, rng):
    d = Ragged(rng, ((1, 37), (6, 20)), dtype=dtype, q_dtype="bfloat16")
    k_scale = 0.05 if dtype == "int8" else 0.5
    options = SCALES | {"k_scale": k_scale}
    made = RUNS[owner](d, **options)
    out, cache = made
    want, _ = d.truth(scale=0.3, k_scale=k_scale, v_scale=3.0)
    assert out.dtype == jnp.bfloat16
    error = np.abs(np.asarray(out, np.float64) - want).max()
    assert error < 2**-8 * max(np.abs(want).max(), 1)
    if cache is not None:
        same_bits(cache, d.full)


@pytest.mark.parametrize("owner", ["v3", "hd64", "tokamax", "sglang"])
def test_q_scale_rounds_queries_to_the_cache(owner, rng):
    d = Ragged(rng, ((1, 37), (6, 20)), dtype="float8_e4m3fn")
    scale = 0.5  # whose quotients have no rounding of their own
    made = RUNS[owner](d, sm_scale=0.3, q_scale=scale)
    q = np.clip(np.asarray(d.q) / scale, -448, 448).astype(jnp.float8_e4m3fn)
    d.q = jnp.asarray(q.astype(np.float32) * scale)
    hold(d, made, scale=0.3)


@pytest.mark.parametrize("owner", ["v3", "tokamax", "sglang"])
def test_out_dtype(owner, rng):
    d = Ragged(rng, q_dtype="bfloat16")
    hold(d, RUNS[owner](d, out_dtype=np.float32))


@pytest.mark.parametrize("owner", ["v3", "tokamax", "ejkernel"])
def test_not_causal(owner, rng):
    d = Ragged(rng)
    name = "causal" if owner == "ejkernel" else "use_causal_mask"
    hold(d, RUNS[owner](d, **{name: False}), causal=False)


def test_xai_temperature(rng):
    """Beyond a position scores grow with its logarithm, ahead of the cap."""
    d = Ragged(rng)
    made = run_sglang(d, sm_scale=0.3, xai_temperature_len=8.0, soft_cap=2.0)
    hold(d, made, scale=0.3, temperature=8.0, soft_cap=2.0)


def test_one_sink_for_all_heads(rng):
    d = Ragged(rng)
    d.sinks[:] = 0.5
    hold(d, run_sglang(d, sinks=0.5), sinks=True)


def test_tokamax_scores_are_summed_up(rng):
    d = Ragged(rng)
    cache = d.by_turns(d.ahead, 4)
    run = dropins.tokamax.batched_ragged_paged_attention
    _, _, lse = run(*step(d, cache), sm_scale=0.3, return_lse=True)
    np.testing.assert_allclose(lse, d.truth(scale=0.3)[1], rtol=0, atol=1e-5)


def test_tokamax_sees_the_cache_alone(rng):
    """Nothing is written then, though nobody says to skip it."""
    d = Ragged(rng)
    out, cache = run_tokamax(d, attention_scope="CACHE_ONLY")
    want, _ = d.truth(cached=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)
    same_bits(cache, d.ahead)


@pytest.mark.parametrize(
    ("owner", "skip"),
    [
        ("v3", {"update_kv_cache": False}),
        ("tokamax", {"skip_kv_update": True}),
        ("tokamax", {"skip_kv_update": False, "update_kv_cache": False}),
    ],
)
def test_a_cache_that_another_layer_wrote(owner, skip, rng):
    """It holds the new keys; those that are passed are not looked at."""
    d = Ragged(rng)
    d.new[:], d.ahead = np.nan, d.full
    hold(d, RUNS[owner](d, **skip))


# ---- data that is wrong --------------------------------------------------------------


APPENDING = ["v3", "hd64", "tokamax", "sglang"]


@pytest.mark.parametrize("owner", APPENDING)
def test_no_sequences_count(owner, rng):
    d = Ragged(rng)
    want, d.count = d.ahead, 0
    out, cache = RUNS[owner](d)
    np.testing.assert_array_equal(out, 0)
    same_bits(cache, want)


@pytest.mark.parametrize("bad", [-1, 10**6, -(2**31)])
@pytest.mark.parametrize("owner", ["v3", "hd64", "tokamax"])
def test_a_page_that_is_none_is_not_written(owner, bad, rng):
    """Nor seen: the last page of a sequence, which holds its new key."""
    d = Ragged(rng, ((1, 37), (6, 20)))
    page = d.tables[0, 2]
    d.tables[0, 2] = bad
    made = RUNS[owner](d)
    d.full[:, page] = d.ahead[:, page]
    d.kv[0], d.sequences = d.kv[0][:, :32], ((1, 32), (6, 20))
    hold(d, made)


@pytest.mark.parametrize("begin", [10**6, -64])
def test_a_table_that_begins_outside_of_all_tables(begin, rng):
    """It has no pages: nothing is seen, nothing written."""
    d = Ragged(rng, ((1, 20), (3, 30)))
    cache, (pages, begins) = d.by_turns(d.ahead, 2), own_tables(d)
    begins[1] = begin
    *ahead, _, starts, distribution = step(d, cache)
    out, cache = dropins.sglang.ragged_paged_attention(
        *ahead, pages, starts, begins, distribution, None
    )
    np.testing.assert_array_equal(out[1:], 0)
    d.full[:, d.tables[1]] = d.ahead[:, d.tables[1]]
    same_bits(d.unpacked(cache, True), d.full)
    assert np.asarray(out[0]).any()


# On a GPU those that append tell the device what layer it is.
GUARDED = [
    pytest.param(owner, "guard", marks=[pytest.mark.cpu] * (owner in APPENDING))
    for owner in RUNS
]


@pytest.mark.parametrize(
    ("owner", "setting"), [*GUARDED, ("sglang", "x64"), ("sglang", "strict")]
)
def test_settings(owner, setting, rng):
    d = Ragged(rng, ((1, 20), (3, 30)))
    options: dict[str, Any] = {"sm_scale": 0.3}
    if owner in WITH_SINKS:
        options["sinks"] = jnp.asarray(d.sinks)
    if owner == "sglang":
        options["xai_temperature_len"] = 8.0
    d.by_turns, d.in_rows, d.pair = map(kept, (d.by_turns, d.in_rows, d.pair))
    RUNS[owner](d, **options)  # makes the cache
    guard = {"guard": lambda: jax.transfer_guard("disallow")}
    with (SETTINGS | guard)[setting]():
        made = RUNS[owner](d, **options)
    sinks, length = "sinks" in options, options.get("xai_temperature_len")
    hold(d, made, scale=0.3, sinks=sinks, temperature=length)


def kept(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, whose arrays are made in the first call and copied in the second."""
    made: list[Any] = []

    def again(*args: Any) -> Any:
        if not made:
            made.append(jax.device_get(make(*args)))
        return jax.device_put(made[0])

    return again


@pytest.mark.parametrize("owner", APPENDING)
def test_fewer_keys_than_queries(owner, rng):
    """Queries ahead of the first key see nothing, and are not written."""
    d = Ragged(rng, ((4, 30),))
    d.kv_lens[0] = 2
    d.ahead[:] = 0
    out, cache = RUNS[owner](d)
    np.testing.assert_array_equal(out[:2], 0)
    block = d.tables[0, 0]
    same_bits(cache[:, block, :2], np.ascontiguousarray(d.new[:, 2:4]))
    cache[:, block, :2] = 0
    np.testing.assert_array_equal(cache, 0)


# ---- inside JAX ----------------------------------------------------------------------


def large(owner: str, dtype: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step over 4096 pages, many times what its workspace takes."""
    shape = (4096, 16, 8, 2, 64) if owner != "hd64" else (4096, 16, 4, 2, 128)
    new = jnp.zeros((20, 8, 64), dtype)
    tables = jnp.zeros(16 * 64, jnp.int32)
    args = [jnp.zeros((20, 32, 64), dtype), new, new, jnp.zeros(shape, dtype)]
    args += [jnp.zeros(16, jnp.int32), tables, jnp.arange(17, dtype=jnp.int32)]
    if owner == "sglang":
        args.append(64 * jnp.arange(17, dtype=jnp.int32))
    args.append(jnp.int32([0, 0, 16]))
    run: dict[str, Any] = {
        "v3": dropins.rpa_v3.ragged_paged_attention,
        "hd64": dropins.rpa_v3_hd64.ragged_paged_attention_hd64,
        "tokamax": dropins.tokamax.ragged_paged_attention,
        "sglang": lambda *x: dropins.sglang.ragged_paged_attention(*x, None),
    }
    return run[owner], tuple(args)


# Of these plain JAX serves one by its tables, and another by its dtype.
LARGE = [(owner, "bfloat16") for owner in APPENDING if owner != "sglang"]
LARGE += [("v3", "float8_e4m3fn")]
LARGE += [
    pytest.param(*call, marks=pytest.mark.cpu)
    for call in (("sglang", "bfloat16"), ("v3", "float32"))
]


@pytest.mark.parametrize(("owner", "dtype"), LARGE)
def test_nothing_of_the_cache_is_copied(owner, dtype):
    """Inside of a jit that donates it, the step takes memory of a step alone."""
    run, args = large(owner, dtype)
    if dtype == "float8_e4m3fn":
        args = (args[0].astype(jnp.bfloat16), *args[1:])
    cache = args[3].nbytes
    compiled = jax.jit(run, donate_argnums=3).lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < cache / 8
    assert memory.alias_size_in_bytes >= cache
    assert not [line for line in compiled.as_text().splitlines() if whole(line, args)]


def whole(line: str, args: Any) -> bool:
    """Whether a line of HLO copies an array as large as the cache."""
    text = line.split(" = ")
    if len(text) < 2 or not any(f" {op}(" in line for op in ("copy", "convert")):
        return False
    dims = text[1].split("[")[1].split("]")[0]
    sizes = [int(n) for n in dims.split(",") if n]
    return int(np.prod(sizes)) >= args[3].size


@pytest.mark.parametrize("owner", APPENDING)
def test_outside_of_jit_the_cache_is_donated(owner):
    run, args = large(owner, "bfloat16")
    at = args[3].unsafe_buffer_pointer()
    _, cache = run(*args)
    assert args[3].is_deleted() and cache.unsafe_buffer_pointer() == at


@pytest.mark.parametrize("owner", RUNS)
def test_new_tables_and_counts_do_not_compile_again(owner, rng):
    """How many sequences count is traced, as tables and lengths are."""
    drawn = [Ragged(rng, s) for s in (((1, 20), (3, 30)), ((2, 20), (2, 30)))]
    names = ("q", "full", "ahead", "new", "kv_lens", "tables", "starts")
    counted: list[Any] = []

    @jax.jit
    def traced(arrays: Any, count: Any) -> Any:
        counted.append(1)
        d = Ragged(np.random.default_rng(0), ((1, 20), (3, 30)))
        for name, array in zip(names, arrays, strict=True):
            setattr(d, name, array)
        run = {"v2": run_v2_traced, "ejkernel": run_ejkernel_traced}
        return run.get(owner, run_traced)(owner, d, count)

    for d, count in zip(drawn, (2, 1), strict=True):
        count = 2 if owner == "ejkernel" else count
        out = traced([getattr(d, name) for name in names], jnp.int32(count))
        want, _ = d.truth(scale=0.3)
        want[d.starts[count] :] = 0
        np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)
    assert len(counted) == 1


def run_v2_traced(owner: str, d: Ragged, count: Any) -> Any:
    cache = jnp.stack(list(d.full), 3).reshape(*d.full.shape[1:3], -1, d.dim)
    run = dropins.rpa_v2.ragged_paged_attention
    n = jnp.reshape(count, 1)
    return run(d.q, cache, d.kv_lens, d.tables, d.starts, n, sm_scale=0.3)


def run_ejkernel_traced(owner: str, d: Ragged, count: Any) -> Any:
    run = dropins.ejkernel.unified_attention
    tables, lens = d.tables[:2], d.kv_lens[:2]
    return run(d.q, *d.full, lens, tables, d.starts[:3], softmax_scale=0.3)


def run_traced(owner: str, d: Ragged, count: Any) -> Any:
    shape = d.ahead.shape[1:3]
    rows = jnp.stack(list(d.ahead), 3).reshape(*shape, -1, 2, d.dim)
    if owner == "hd64":
        rows = jnp.concatenate(list(d.ahead), -1)[:, :, :, None]
    n = jnp.stack([0 * count, 0 * count, count])
    args = [d.q, *d.new, rows, d.kv_lens, d.tables.reshape(-1), d.starts]
    runs: dict[str, Any] = {
        "v3": dropins.rpa_v3.ragged_paged_attention,
        "hd64": dropins.rpa_v3_hd64.ragged_paged_attention_hd64,
        "tokamax": dropins.tokamax.ragged_paged_attention,
    }
    if owner == "sglang":
        begins = d.tables.shape[1] * d.page * jnp.arange(d.starts.shape[0])
        run = dropins.sglang.ragged_paged_attention
        return run(*args, begins, n, None, sm_scale=0.3)[0]
    return runs[owner](*args, n, sm_scale=0.3)[0]


# ---- the owners ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 5, "soft_cap": 2.0}, SCALES]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_of_jax_for_version_2(options, dtype, rng):
    d = Ragged(rng, dtype=dtype, q_dtype=dtype)
    cache = jnp.nan_to_num(d.by_turns(d.full, None))
    n = d.count
    args = (d.q[: d.tokens], cache, d.kv_lens[:n], jnp.maximum(d.tables[:n], 0))
    args = (*args, jnp.asarray(d.starts[: n + 1]), jnp.array([n]))
    with jax.default_matmul_precision("highest"):
        want = ref_ragged_paged_attention(*map(jnp.asarray, args), **options)
        made = dropins.rpa_v2.ragged_paged_attention(*args, **options)
    bar = 1e-5 if dtype == "float32" else 6e-2
    np.testing.assert_allclose(
        made.astype(jnp.float32), want.astype(jnp.float32), rtol=0, atol=bar
    )


def test_the_signature_of_jax_for_version_2():
    assert parameters(dropins.rpa_v2.ragged_paged_attention) == parameters(
        jax_ragged_paged_attention
    )


def parameters(function: Any) -> list[tuple[Any, ...]]:
    return [
        (p.name, p.kind, p.default)
        for p in inspect.signature(function).parameters.values()
    ]


STEP = "queries keys values {} kv_lens page_indices cu_q_lens"
# Of the owners' sources: positional arguments, the bar, those by name.
SIGNATURES = {
    dropins.rpa_v3.ragged_paged_attention: STEP.format("kv_cache")
    + """ distribution |
    use_causal_mask update_kv_cache skip_kv_mask sm_scale sliding_window soft_cap
    out_dtype mask_value q_scale k_scale v_scale chunk_prefill_size d_block_sizes
    p_block_sizes m_block_sizes vmem_limit_bytes debug_mode disable_bounds_checks
    disable_semaphore_checks""",
    dropins.rpa_v3_hd64.ragged_paged_attention_hd64: STEP.format("kv_cache")
    + """ distribution attention_sink |
    sm_scale sliding_window soft_cap mask_value q_scale k_scale v_scale
    chunk_prefill_size num_kv_pages_per_block num_queries_per_block vmem_limit_bytes
    debug_mode""",
    dropins.tokamax.ragged_paged_attention: STEP.format("kv_cache")
    + """ distribution |
    sm_scale sliding_window soft_cap mask_value use_per_token_scale
    per_token_scale_dtype q_scale k_scale v_scale dynamic_k_scale dynamic_v_scale
    chunk_prefill_size decode_block_sizes prefill_block_sizes vmem_limit_bytes
    debug_mode out_dtype use_causal_mask skip_kv_update update_kv_cache kv_layout
    decode_query_size cp_group_size cp_rank attention_scope return_lse
    implementation""",
    dropins.sglang.ragged_paged_attention: STEP.format("kv_cache_fused")
    + """ cu_kv_lens distribution custom_mask attention_sink |
    causal sm_scale sliding_window soft_cap mask_value q_scale k_scale v_scale
    xai_temperature_len softmax_dtype chunk_prefill_size d_block_sizes p_block_sizes
    m_block_sizes vmem_limit_bytes out_dtype skip_kv_mask disable_semaphore_checks
    debug_mode mask_aligned_to_cu_kv""",
    dropins.ejkernel.unified_attention: """queries key_cache value_cache kv_lens
    block_tables query_start_loc alibi_slopes qq_bias softmax_aux |
    softmax_scale causal sliding_window logits_soft_cap seq_threshold_3d platform mesh
    in_specs out_specs cfg""",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__module__)
def test_names_and_order_are_the_owners(function):
    positional, by_name = (part.split() for part in SIGNATURES[function].split("|"))
    made = list(inspect.signature(function).parameters.values())
    keyword = inspect.Parameter.KEYWORD_ONLY
    assert [p.name for p in made if p.kind != keyword] == positional
    assert [p.name for p in made if p.kind == keyword] == by_name
    only = inspect.Parameter.POSITIONAL_ONLY
    assert all(p.kind == only for p in made[:9]) == ("ejkernel" in function.__module__)
