"""`paged_attention(quantize_queries=True)`: plain JAX, and Hopper's kernel, by JAX.

Against float64, with queries rounded as they are to be: plain JAX to bfloat16's digits;
the kernel, on the emulator and on a GPU, within a few per cent of a row, since it
rounds probabilities, too. (native/test_paged_launches.py has more, by the C interface.)
"""

from __future__ import annotations

import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_gpus import on_each_gpu, pretend
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from paged_problems import Case, Problem, few_rows
from served_kernels import skip_unless_served

from jax_kvblock import BlockSpec, KVPool, paged_attention
from jax_kvblock.paged import dispatch
from jax_kvblock.paged.narrow import heads_of_tile

E4M3 = {"cache": "e4m3", "narrow": True, "scales": "heads"}
MIXED = ((1, 60), (90, 140), (3, 40), (70, 70), (1, 7))
LAYOUTS = {"NHD": "B L O T H D", "HND": "B L O H T D"}
CASES = {
    "mixed": Case(sequences=MIXED, more_rows=3, **E4M3),
    "d128, a window, sinks": Case(
        sequences=MIXED,
        heads=8,
        head_dim=128,
        value_dim=128,
        window=(50, 0),
        sinks=1,
        **E4M3,
    ),
    "blocks of 5, one scale": Case(
        sequences=MIXED, block_size=5, **{**E4M3, "scales": "all"}
    ),
    "groups of 12": Case(sequences=MIXED, heads=12, kv_heads=1, **E4M3),
    "ids of no block": Case(
        sequences=MIXED, bad_ids=((1, 2, -1), (3, 0, 10**6)), **E4M3
    ),
    "a batch": Case(
        padded=90, calls=3, sequences=((90, 140), (1, 70), (66, 66)), **E4M3
    ),
    "split": Case(sequences=((70, 300), (1, 20)), split_size=256, **E4M3),
    "lengths beyond the table": Case(
        kv_lens=(10**6, -5, 2**31 - 1, 9),
        sequences=((100, 160), (70, 96), (80, 160), (1, 9)),
        **E4M3,
    ),
    "no scales, no band": Case(
        sequences=MIXED, window=(-1, -1), **{**E4M3, "scales": "none"}
    ),
    "a window on both sides": Case(sequences=MIXED, window=(40, 30), **E4M3),
    "empty sequences": Case(
        sequences=((0, 0), (90, 140), (0, 30), (70, 0), (1, 0), (66, 67)),
        **E4M3,
    ),
    **{
        f"{layout}, blocks of {size}": Case(
            sequences=((100, 310), (1, 60), (75, 75)),
            block_size=size,
            layout=LAYOUTS[layout],
            heads=8,
            head_dim=128,
            value_dim=128,
            **E4M3,
        )
        for layout in LAYOUTS
        for size in (16, 64, 128)
    },
}


def emulate(request) -> None:
    request.getfixturevalue("paged_as_cuda")
    library = ctypes.CDLL(str(request.getfixturevalue("attention_library")))
    library.emulator_set_hopper(1)
    request.addfinalizer(lambda: library.emulator_set_hopper(0))


@pytest.fixture(
    params=[
        "xla",
        pytest.param("emulator", marks=[pytest.mark.wide, pytest.mark.cpu]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def who(request):
    """Who computes: implementation="xla" or None."""
    if request.param == "emulator":
        emulate(request)
    elif request.param == "cuda":
        skip_unless_served("cuda_sm90", backward=False)
    return "xla" if request.param == "xla" else None


def pool_of(x: Problem) -> KVPool:
    c = x.case
    (layout,) = (name for name, axes in LAYOUTS.items() if axes == c.layout)
    sizes = 1, 2, c.block_size, c.kv_heads, x.pages.shape[-1]
    spec = BlockSpec(*sizes, "float8_e4m3fn", layout=layout)
    return KVPool(jnp.asarray(x.pages), spec)


def arguments(x: Problem) -> tuple[tuple, dict]:
    c = x.case
    scales = [s.reshape(-1) for s in x.scales]
    k, v = (s[0] if len(s) == 1 else jnp.asarray(s) for s in scales)
    given = {"k_scale": k, "v_scale": v, "return_lse": True, "quantize_queries": True}
    left, right = (None if side < 0 else side for side in c.window)
    given["causal"] = right == 0
    given["window"] = (left, right)
    given["sinks"] = jnp.asarray(x.sinks[0]) if c.sinks else None
    given["split_size"] = c.split_size or None
    if c.padded:
        given["q_lens"] = x.starts[:, 1]
        q = jnp.asarray(x.q)
    else:
        given["query_start"] = x.starts[0]
        q = jnp.asarray(x.q[0])
    return (q, pool_of(x), 0, x.tables, x.kv_lens), given


def spoil_free_memory() -> None:
    """Results, and the workspace, lie where NaN was, and are not 0 by luck."""
    jnp.full(1 << 22, jnp.nan).block_until_ready()


def attend(x: Problem, who: str | None) -> tuple[np.ndarray, np.ndarray]:
    """out and lse, `[C, R, ...]`."""
    positional, given = arguments(x)
    spoil_free_memory()
    out, lse = paged_attention(*positional, **given, implementation=who)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    shape = x.q.shape[:3]
    return np.asarray(out).reshape(*shape, -1), np.asarray(lse).reshape(shape)


def hold(x: Problem, who: str | None, out: np.ndarray, lse: np.ndarray) -> None:
    if who is None:
        x.hold(out, lse)
        return
    truth = x.truth()
    out_is, lse_is = truth["out"][0], truth["lse"][0][..., 0]
    off = np.linalg.norm(out.astype(np.float64) - out_is, axis=-1)
    assert (off <= 2.0**-8 * np.linalg.norm(out_is, axis=-1) + 1e-5).all()
    np.testing.assert_allclose(lse, lse_is, rtol=1e-5, atol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, who):
    x = Problem(CASES[name])
    hold(x, who, *attend(x, who))


def test_fresh_numbers_each_time(who):
    """Of one program: numbers, lengths, tables and starts are operands."""
    call = None
    for seed in range(3):
        lens = [(90 - 10 * seed, 140), (1, 60 + seed), (3, 40), (7 + 10 * seed, 70)]
        x = Problem(Case(sequences=tuple(lens), seed=seed, **E4M3))
        positional, given = arguments(x)
        start, k, v = (given.pop(n) for n in ("query_start", "k_scale", "v_scale"))
        q, pool, layer, tables, kv_lens = positional

        def attend_all(q, data, tables, lens, start, k, v, spec=pool.spec, given=given):
            return paged_attention(
                *(q, KVPool(data, spec), 0, tables, lens),
                query_start=start,
                k_scale=k,
                v_scale=v,
                implementation=who,
                **given,
            )

        call = call or jax.jit(attend_all)
        out, lse = call(q, pool.data, tables, kv_lens, start, k, v)
        assert layer == 0
        hold(x, who, np.asarray(out)[None], np.asarray(lse)[None])
    assert call._cache_size() == 1


def test_rows_of_nobody_are_zeros(who):
    x = Problem(CASES["mixed"])
    out, lse = attend(x, who)
    assert (out[0, -3:] == 0).all()
    assert (lse[0, -3:] == -np.inf).all()


def test_with_split_size_a_sequence_alone_has_the_same_bits(who):
    x = Problem(CASES["split"])
    out, lse = attend(x, who)
    for b in range(len(x.tables)):
        _, first, end = x.sequence_rows(b)
        alone = attend(x.alone(b), who)
        assert (alone[0][0] == out[0, first:end]).all()
        assert (alone[1][0] == lse[0, first:end]).all()


@pytest.mark.cpu
def test_it_is_not_what_unrounded_queries_give():
    x = Problem(CASES["mixed"])
    positional, given = arguments(x)
    out, _ = attend(x, "xla")
    given["quantize_queries"] = False
    other, _ = paged_attention(*positional, **given, implementation="xla")
    same = (out[0] == np.asarray(other)).all((-1, -2))
    long = x.rows_of_long(few_rows(x))[0]
    assert same[~long].all()
    assert same[long].sum() == 1  # the first of 70 queries of 70 keys sees one key


def test_a_prefill_in_chunks(who):
    """Chunks that begin where tiles of queries do are rounded as the whole."""
    x = Problem(Case(sequences=((300, 420),), **E4M3))
    (q, pool, layer, tables, _), given = arguments(x)
    parts = []
    for first, end in ((0, 128), (128, 256), (256, 300)):
        given["query_start"] = np.array([0, end - first], np.int32)
        lens = np.array([120 + end], np.int32)
        part = q[first:end], pool, layer, tables, lens
        parts.append(paged_attention(*part, **given, implementation=who))
    out, lse = (np.concatenate(part)[None] for part in zip(*parts, strict=True))
    hold(x, who, out, lse)


def test_vmap_over_queries_and_lengths(who):
    x = Problem(CASES["mixed"])
    positional, given = arguments(x)
    q, pool, layer, tables, lens = positional
    shorter = jnp.stack([lens, lens - 1])
    other = jnp.stack([q, q * 3])

    def call(q, lens):
        return paged_attention(
            q, pool, layer, tables, lens, **given, implementation=who
        )

    together = jax.vmap(call)(other, shorter)
    for i in range(2):
        alone = call(other[i], shorter[i])
        for a, b in zip(together, alone, strict=True):
            got, want = (np.asarray(y[i] if y is a else y, np.float64) for y in (a, b))
            bar = 2e-2 if who is None else 2e-3
            np.testing.assert_allclose(got, want, rtol=bar, atol=bar)


def test_a_traced_layer_under_jit(who):
    x = Problem(CASES["mixed"])
    (q, pool, _, tables, lens), given = arguments(x)
    call = functools.partial(paged_attention, **given, implementation=who)
    out, lse = jax.jit(call)(q, pool, jnp.int32(0), tables, lens)
    hold(x, who, np.asarray(out)[None], np.asarray(lse)[None])


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(number, who):
    x = Problem(CASES["mixed"])
    long = x.rows_of_long(few_rows(x))[0]
    row = int(np.argmax(long)) + 20
    x.q[0, row, 1, 3] = number
    out, lse = attend(x, who)
    hit = np.zeros(x.q.shape[1:3], bool)
    hit[row, 1] = True
    assert (np.isnan(out[0].astype(np.float32)).all(-1) == hit).all()
    assert (np.isnan(lse[0]) == hit).all()


def test_a_key_scale_below_0_makes_nan_of_sequences_with_many_queries(who):
    x = Problem(CASES["mixed"])
    x.scales[0][..., 1] *= -1
    out, _ = attend(x, who)
    nan = np.isnan(out[0].astype(np.float32)).all(-1)
    long = x.rows_of_long(few_rows(x))[0]
    assert (nan == (long[:, None] & (np.arange(4) >= 2))).all()


def test_heads_cut_over_a_mesh(four_cpus):
    """Each device has the KV heads of its query heads: the same numbers."""
    case = Case(sequences=MIXED, heads=8, kv_heads=4, **E4M3)
    x = Problem(case)
    (q, pool, layer, tables, lens), given = arguments(x)
    mesh = jax.make_mesh((2,), ("a",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def put(a, *spec):
        return jax.device_put(a, NamedSharding(mesh, P(*spec)))

    cut = put(pool.data, None, None, None, None, "a")
    moved = put(q, None, "a"), KVPool(cut, pool.spec), layer, tables, lens
    call = jax.jit(
        functools.partial(paged_attention, **given, implementation="xla"),
        static_argnums=2,
    )
    out, lse = call(*moved)
    assert out.sharding.spec == P(None, "a")
    hold(x, "xla", np.asarray(out)[None], np.asarray(lse)[None])


def test_heads_of_a_tile():
    """As kvblock/paged_attention.h says."""
    tiles = {1: 1, 2: 2, 4: 4, 7: 7, 8: 8, 12: 12, 16: 16, 71: 1, 128: 128, 256: 128}
    assert {group: heads_of_tile(group) for group in tiles} == tiles


# ---- messages ------------------------------------------------------------------------


def call(**changes):
    x = Problem(CASES["mixed"])
    (q, pages, layer, tables, lens), given = arguments(x)
    names = ("q", "pages", "layer", "block_tables", "kv_lens")
    positional = dict(zip(names, (q, pages, layer, tables, lens), strict=True))
    return paged_attention(**{**positional, **given, **changes})


def in_bfloat16() -> KVPool:
    spec = BlockSpec(1, 2, 16, 2, 64, "bfloat16", layout="NHD")
    return KVPool.zeros(spec, 20)


WRONG = {
    "another cache": (
        lambda: {"pages": in_bfloat16(), "k_scale": None, "v_scale": None},
        TypeError,
        "quantize_queries is for blocks of float8_e4m3fn, got blocks of bfloat16; "
        "leave it out",
    ),
    "scales of tokens": (
        lambda: {"v_scale": jnp.ones((Problem(CASES["mixed"]).blocks, 16, 2))},
        ValueError,
        "with quantize_queries v_scale must be a number or one for each KV head, got "
        ".*; quantize keys and values with one scale for each head, or leave",
    ),
    "ranges": (
        lambda: {"ranges": np.zeros((168, 2), np.int32)},
        ValueError,
        "quantize_queries does not go with ranges; leave one of them out",
    ),
    "drafts": (
        lambda: {"tree_mask": np.zeros((168, 1), np.int32)},
        ValueError,
        "quantize_queries does not go with tree_mask; leave one of them out",
    ),
    "no flag": (
        lambda: {"quantize_queries": 2},
        TypeError,
        "quantize_queries must be",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name):
    changes, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        call(implementation="xla", **changes())


@pytest.mark.cpu
def test_nothing_is_computed_in_more_bits_unasked():
    words = (
        "do not serve cpu, for which this is lowered. Leave it out to compute in more"
    )
    with pytest.raises(ValueError, match=words):
        call()
    with pytest.raises(ValueError, match="implementation='xla' computes the same"):
        jax.jit(lambda q: call(q=q))(jnp.zeros((173, 4, 64), jnp.bfloat16))


@pytest.mark.cpu
@on_each_gpu
def test_gpus_without_the_kernel_are_an_error(name, monkeypatch):
    """For None and "cuda", and only where some sequence may have many queries."""
    words = pretend(name, monkeypatch)
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *given: choose(*given[:2], "cuda"))
    fix = "implementation='xla'"
    with pytest.raises(ValueError, match=f"{words}.*Leave it out.*{fix} computes"):
        call()
    with pytest.raises(ValueError, match=f"{words}.*{fix} does"):
        call(implementation="cuda")
    jax.jit(functools.partial(call, implementation="xla")).lower()


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"softcap": 3.0}, "softcap with quantize_queries"),
        ({"scale": -1.0}, "a scale that is not above 0 with quantize_queries"),
    ],
)
def test_what_the_kernel_lacks_is_said(changes, words, paged_as_cuda):
    with pytest.raises(ValueError, match=f"do not serve {words}"):
        call(**changes)
    call(**changes, implementation="xla")


@pytest.mark.cpu
def test_float16_is_not_served(paged_as_cuda):
    x = Problem(CASES["mixed"])
    q = jnp.asarray(x.q[0]).astype(jnp.float16)
    with pytest.raises(ValueError, match=r"q float16 with quantize_queries \(bfloat16"):
        call(q=q, implementation="cuda")


def test_a_decode_step_has_nothing_to_round():
    x = Problem(Case(sequences=((1, 60), (1, 9)), **E4M3))
    positional, given = arguments(x)
    without = {**given, "quantize_queries": False}
    for a, b in zip(
        paged_attention(*positional, **given),
        paged_attention(*positional, **without),
        strict=True,
    ):
        assert (np.asarray(a) == np.asarray(b)).all()
