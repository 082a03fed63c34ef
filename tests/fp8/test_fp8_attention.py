"""Quantization to e4m3, and attention over it in plain JAX, on a CPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fp8_gpus import on_each_gpu, pretend
from jax.sharding import NamedSharding, PartitionSpec
from messages import check

import jax_kvblock
from jax_kvblock import (
    AttentionScales,
    AttentionTiles,
    dot_product_attention,
    flash_attention,
)
from jax_kvblock.attention import dispatch
from jax_kvblock.fp8 import FP8AttentionConfig, fp8_attention, quantize_qkv
from jax_kvblock.parallel import context_parallel_attention

E4M3 = jnp.float8_e4m3fn
ONE = np.float32(1)
pytestmark = pytest.mark.usefixtures("four_cpus")
OF_SCORES = pytest.mark.parametrize("qk_dtype", ["float8_e4m3fn", "int8"])
ROUGH = FP8AttentionConfig("tensor", "tensor", "tensor", False, False)


def arrays(rng, b=2, t=300, s=260, n=4, k=2, d=32, dtype=jnp.bfloat16):
    shapes = (b, t, n, d), (b, s, k, d), (b, s, k, d)
    return [jnp.asarray(rng.normal(size=x), dtype) for x in shapes]


def relative(a, b):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def same(a, b):
    """But for the order of sums, which a GPU may choose anew."""
    return a.shape == b.shape and relative(a, b) < 0.003


@pytest.mark.parametrize("shared", ["tensor", "head", "block"])
def test_quantized_as_numpy_does(shared, rng):
    q, k, v = arrays(rng)
    config = FP8AttentionConfig(shared, shared, smooth_keys=False, rotate=False)
    x = quantize_qkv(q, k, v, config)
    for name, a in (("q", q), ("k", k)):
        wide = np.asarray(a.astype(jnp.float32))
        scales = np.asarray(getattr(x.scales, name))
        for b, h in np.ndindex(scales.shape[:2]):
            of = {"tensor": wide[b], "head": wide[b, :, h]}
            for i in range(scales.shape[2]):
                rows = (
                    slice(i * 128, i * 128 + 128) if shared == "block" else slice(None)
                )
                largest = np.abs(of.get(shared, wide[b, rows, h])).max()
                assert np.isclose(scales[b, h, i] * 448, largest, rtol=1e-6)
                exact = (wide[b, rows, h] / scales[b, h, i]).astype(
                    ml_dtypes.float8_e4m3fn
                )
                mine = np.asarray(getattr(x, name)[b, rows, h])
                assert (mine.view(np.uint8) == exact.view(np.uint8)).all()


def test_rows_beyond_lengths_count_for_nothing(rng):
    q, k, v = arrays(rng)
    q_lens, kv_lens = np.array([300, 11]), np.array([70, 0])
    short = quantize_qkv(q, k, v, q_lens=q_lens, kv_lens=kv_lens)

    def spoiled(a, lens):
        beyond = np.arange(a.shape[1])[None] >= lens[:, None]
        return jnp.where(beyond[..., None, None], jnp.nan, a)

    other = quantize_qkv(
        spoiled(q, q_lens),
        spoiled(k, kv_lens),
        spoiled(v, kv_lens),
        q_lens=q_lens,
        kv_lens=kv_lens,
    )
    for a, b in zip(jax.tree.leaves(short), jax.tree.leaves(other), strict=True):
        assert not jnp.isnan(b.astype(jnp.float32)).any()
        assert (a == b).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_within_some_per_cent(dtype, rng):
    q, k, v = arrays(rng, dtype=jnp.dtype(dtype))
    out, lse = fp8_attention(
        q, k, v, causal=True, return_lse=True, implementation="xla"
    )
    exact, exact_lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert out.dtype == jnp.bfloat16
    assert 0.005 < relative(out, exact) < 0.06
    assert 0 < jnp.abs(lse - exact_lse).max() < 0.2


# Turned, few large numbers are spread over their rows, which are then nearly as good as
# normally distributed ones: off by 0.046 in e4m3, whatever their scales, of which the
# values alone are 0.026. One scale for all is off by 0.07 to 0.08 with so few. So in
# e4m3 0.6 of that is not reached: over draws it is 0.60 to 0.75. With queries and keys
# in int8 little but the values' rounding is left.
@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("kind", "qk_dtype", "share"),
    [
        ("a mean of the keys", "float8_e4m3fn", 0.45),
        ("a mean of the keys", "int8", 0.35),
        ("few large numbers", "float8_e4m3fn", 0.75),
        ("few large numbers", "int8", 0.5),
    ],
)
def test_what_config_is_for(kind, qk_dtype, share, rng):
    """Beside one scale for all: errors of two kinds of arrays that models have."""
    config = FP8AttentionConfig(qk_dtype=qk_dtype)
    q, k, v = arrays(rng, d=128)
    if kind == "a mean of the keys":
        k = k + jnp.asarray(rng.normal(0, 4, (1, 1, 2, 128)), jnp.bfloat16)
    else:

        def large(x):
            return jnp.asarray(
                rng.normal(0, 10, x.shape) * (rng.random(x.shape) < 0.003), x.dtype
            )

        q, k = q + large(q), k + large(k)
    exact = flash_attention(q, k, v)
    finer, rough = (
        relative(fp8_attention(q, k, v, how, implementation="xla"), exact)
        for how in (config, ROUGH)
    )
    assert finer < share * rough
    # Not better than normally distributed numbers are.
    plain = arrays(rng, d=128)
    exact = flash_attention(*plain)
    ordinary = relative(fp8_attention(*plain, config, implementation="xla"), exact)
    assert 0.9 * ordinary < finer < 1.3 * ordinary


@pytest.mark.parametrize("smooth", [False, True])
def test_the_log_sum_exp_is_that_of_the_keys_as_they_were(smooth, rng):
    q, k, v = arrays(rng)
    k = k + 2
    config = FP8AttentionConfig(smooth_keys=smooth)
    options = dict(causal=True, kv_lens=[200, 0], scale=0.3, return_lse=True)
    _, lse = fp8_attention(q, k, v, config, implementation="xla", **options)
    _, exact = flash_attention(q, k, v, **options)
    there = ~np.isinf(exact)
    assert (np.isinf(lse) == ~there).all()
    assert np.abs(lse - exact)[there].mean() < 0.15


def test_gradients_are_those_in_16_bits(rng):
    q, k, v = arrays(rng)
    d_o = jnp.asarray(rng.normal(size=q.shape), jnp.bfloat16)
    d_lse = jnp.asarray(rng.normal(size=q.shape[:3]), jnp.float32)
    options = dict(
        window=(40, 3), segment_ids=(np.arange(300) // 90)[None].repeat(2, 0)
    )
    options["segment_ids"] = (options["segment_ids"], options["segment_ids"][:, :260])
    _, mine = jax.vjp(
        lambda *x: fp8_attention(*x, return_lse=True, implementation="xla", **options),
        q,
        k,
        v,
    )
    _, its = jax.vjp(
        lambda *x: flash_attention(*x, return_lse=True, **options), q, k, v
    )
    for a, b in zip(mine((d_o, d_lse)), its((d_o, d_lse)), strict=True):
        assert same(a, b)


@OF_SCORES
def test_under_vmap_jit_and_scan(qk_dtype, rng):
    q, k, v = arrays(rng)
    config = FP8AttentionConfig(qk_dtype=qk_dtype)

    def attend(*x):
        return fp8_attention(*x, config, causal=True, implementation="xla")

    whole = attend(q, k, v)
    each = jax.jit(jax.vmap(attend))(q[:, None], k[:, None], v[:, None])[:, 0]
    assert same(each, whole)
    _, steps = jax.lax.scan(
        lambda _, x: (None, attend(*(a[None] for a in x))), None, (q, k, v)
    )
    assert same(steps[:, 0], whole)
    shared = jax.vmap(attend, in_axes=(0, None, None))(q[:, None], k[:1], v[:1])
    assert same(shared[1], attend(q[1:], k[:1], v[:1]))


@OF_SCORES
def test_scales_are_cut_with_their_arrays(qk_dtype, rng):
    """Over batch and heads nothing is gathered."""
    mesh = jax.make_mesh(
        (2, 2),
        ("b", "h"),
        (jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices("cpu")[:4],
    )
    x = quantize_qkv(*arrays(rng), FP8AttentionConfig(qk_dtype=qk_dtype))

    def cut(a, *spec):
        return jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))

    put = [cut(a, "b", None, "h", None) for a in (x.q, x.k, x.v)]
    scales = jax.tree.map(lambda a: cut(a, "b", "h", None), x.scales)
    attend = jax.jit(
        lambda q, k, v, s: flash_attention(
            q, k, v, scales=s, causal=True, implementation="xla"
        )
    )
    lowered = attend.lower(*put, scales).compile()
    assert "all-gather" not in lowered.as_text()
    assert same(attend(*put, scales), attend(x.q, x.k, x.v, x.scales))


@pytest.mark.parametrize("shape", ["[]", "[N]", "[1, N, 1]", "[B, 1, blocks]"])
def test_scales_of_every_shape(shape, rng):
    x = quantize_qkv(*arrays(rng), FP8AttentionConfig("tensor", "tensor", "tensor"))
    whole = x.scales.q[:1, :1]
    scales = {
        "[]": whole.reshape(()),
        "[N]": jnp.broadcast_to(whole.reshape(1), 4),
        "[1, N, 1]": jnp.broadcast_to(whole, (1, 4, 1)),
        "[B, 1, blocks]": jnp.broadcast_to(whole, (2, 1, 3)),
    }[shape]
    full = jnp.broadcast_to(whole, (2, 4, 1))
    out, other = (
        flash_attention(
            x.q,
            x.k,
            x.v,
            scales=AttentionScales(q, x.scales.k, x.scales.v),
            implementation="xla",
        )
        for q in (scales, full)
    )
    assert same(out, other)


def call(rng, changes):
    x = quantize_qkv(*arrays(rng))
    given = {"q": x.q, "k": x.k, "v": x.v, "scales": x.scales}
    return flash_attention(**{**given, "implementation": "xla", **changes(x)})


BAD = {
    "needs scales=AttentionScales": lambda x: {"scales": None},
    "needs scales=AttentionScales(q, k, v), got tuple": lambda x: {"scales": (1, 1, 1)},
    "scales.q must be float32": lambda x: {
        "scales": AttentionScales(np.float16(1), ONE, ONE)
    },
    "scales.k must be [], [2] or [1 or 2, 1 or 2, 1 or 3]": lambda x: {
        "scales": AttentionScales(ONE, np.ones(3, np.float32), ONE)
    },
    "scales.v must be [], [2] or [1 or 2, 1 or 2, 1]": lambda x: {
        "scales": AttentionScales(ONE, ONE, np.ones((2, 2, 3), np.float32))
    },
    "k must have q's dtype": lambda x: {"k": x.k.astype(jnp.bfloat16)},
    "scales are for 8 bits": lambda x: {
        n: getattr(x, n).astype(jnp.bfloat16) for n in "qkv"
    },
    "v must be float8_e4m3fn beside q in float8_e4m3fn, got": lambda x: {
        "v": x.v.astype(jnp.bfloat16)
    },
    "v must be float8_e4m3fn beside q in int8, got": lambda x: {
        n: getattr(x, n).astype(jnp.int8) for n in "qkv"
    },
    "k must have q's dtype, int8, got bfloat16[2, 260, 2, 32]; "
    "jax_kvblock.fp8.quantize_qkv makes all three": lambda x: {
        "q": x.q.astype(jnp.int8),
        "k": x.k.astype(jnp.bfloat16),
    },
    "k is in 8 bits, int8[2, 260, 2, 32], and q is not, bfloat16": lambda x: {
        "q": x.q.astype(jnp.bfloat16),
        "k": x.k.astype(jnp.int8),
    },
    "bias must be bfloat16 or float32, got int8[2, 4, 300, 260]; cast it with "
    ".astype(jnp.float32)": lambda x: {"bias": jnp.zeros((2, 4, 300, 260), jnp.int8)},
    "which do not serve cpu": lambda x: {"implementation": None},
    "'cuda_sm90' needs an NVIDIA GPU": lambda x: {"implementation": "cuda_sm90"},
    "does not serve dtype float8_e4m3fn (Hopper's": lambda x: {
        "implementation": "cuda"
    },
    "does not serve softcap in 8 bits": lambda x: {
        "implementation": "cuda_sm90",
        "softcap": 3.0,
    },
    "does not serve bias in 8 bits": lambda x: {
        "implementation": "cuda_sm90",
        "bias": jnp.zeros((2, 4, 300, 260)),
    },
    "does not serve tiles in 8 bits": lambda x: {
        "implementation": "cuda_sm90",
        "tiles": AttentionTiles.from_mask(np.ones((300, 260), bool)),
    },
    "does not serve dropout_rate in 8 bits": lambda x: {
        "implementation": "cuda_sm90",
        "dropout_rate": 0.25,
        "dropout_seed": 1,
    },
    "does not serve scale=-1 in 8 bits (above 0": lambda x: {
        "implementation": "cuda_sm90",
        "scale": -1.0,
    },
    "does not serve scale=0 in 8 bits (above 0": lambda x: {
        "implementation": "cuda_sm90",
        "scale": 0.0,
    },
    "scales cannot be combined with cu_seqlens": lambda x: {
        **{n: getattr(x, n).astype(jnp.bfloat16)[0] for n in "qkv"},
        "cu_seqlens": ([0, 300], [0, 260]),
    },
    "cu_seqlens; pass a batch, [B, T, N, D], with segment_ids, for 8 bits": lambda x: {
        **{n: getattr(x, n)[0] for n in "qkv"},
        "cu_seqlens": ([0, 300], [0, 260]),
    },
}


@pytest.mark.parametrize("message", BAD)
def test_messages(message, rng):
    with pytest.raises((TypeError, ValueError)) as error:
        call(rng, BAD[message])
    assert message in str(error.value)


def test_no_derivatives_of_8_bits(rng):  # of integers jax has none by itself
    x = quantize_qkv(*arrays(rng))

    def attend(q):
        return flash_attention(q, x.k, x.v, scales=x.scales, implementation="xla")

    with pytest.raises(NotImplementedError, match="fp8_attention has those"):
        jax.grad(lambda q: attend(q).astype(jnp.float32).sum())(x.q)


@OF_SCORES
def test_other_functions_take_no_8_bits(qk_dtype, rng):
    x = quantize_qkv(*arrays(rng), FP8AttentionConfig(qk_dtype=qk_dtype))
    mesh = jax.make_mesh(
        (1,), ("sp",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:1]
    )
    functions = (
        dot_product_attention,
        quantize_qkv,
        jax.shard_map(
            functools.partial(context_parallel_attention, axis_name="sp"),
            mesh=mesh,
            in_specs=PartitionSpec(None, "sp"),
            out_specs=PartitionSpec(None, "sp"),
        ),
    )
    for function in functions:
        with pytest.raises(TypeError, match="must be bfloat16, float16 or float32"):
            function(x.q, x.k, x.v)


@OF_SCORES
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("rotate", [False, True])
def test_nan_stays(rotate, name, qk_dtype, rng):
    """Of rows that share the scale of one in q, and of a head's in k and v."""
    given = dict(zip("qkv", arrays(rng), strict=True))
    given[name] = given[name].at[1, 140, 1, 3].set(jnp.nan)
    config = FP8AttentionConfig(rotate=rotate, qk_dtype=qk_dtype)
    out = fp8_attention(*given.values(), config, implementation="xla")
    hit = np.zeros((2, 300, 4), bool)
    if name == "q":
        hit[1, 128:256, 1] = True
    else:
        hit[1, :, 2:] = True
    assert (jnp.isnan(out).any(-1) == hit).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": "row"}, "queries must be"),
        ({"keys": None}, "keys must be"),
        ({"values": "block"}, "values must be"),
        ({"smooth_keys": 1}, "smooth_keys must be True or False"),
        ({"qk_dtype": "int4"}, "qk_dtype must be"),
        ({"qk_dtype": np.int8}, "qk_dtype must be"),
    ],
)
def test_configs(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        FP8AttentionConfig(**arguments)


def test_nothing_is_computed_in_more_bits_unasked(rng):
    with pytest.raises(ValueError, match="Cast q, k and v times their scales"):
        fp8_attention(*arrays(rng))
    with pytest.raises(
        TypeError, match="config must be an FP8AttentionConfig, got bool"
    ):
        fp8_attention(*arrays(rng), True)


@pytest.mark.cpu
def test_what_is_exported_for_a_gpu_that_is_not_here_names_its_kernels(rng):
    x = quantize_qkv(*arrays(rng))

    def attend(*given):
        return flash_attention(*given, scales=x.scales)

    with pytest.raises(ValueError, match=r"no Hopper GPU is here; .*'cuda_sm90'"):
        jax.export.export(jax.jit(attend), platforms=["cuda"])(x.q, x.k, x.v)


@pytest.mark.cpu
@pytest.mark.cases(5)
@on_each_gpu
def test_gpus_without_the_kernel_are_an_error(name, monkeypatch, rng):
    """For None and "cuda_sm90", of arrays in 8 bits and of those that become it."""
    words = pretend(name, monkeypatch)
    choose = dispatch.choose

    def on_gpu(config, x, platform, **how):
        return choose(config, x, "cuda", **how)

    monkeypatch.setattr(dispatch, "choose", on_gpu)
    q, k, v = arrays(rng, b=1, t=4, s=8, n=2, k=1, d=16)
    x = quantize_qkv(q, k, v, implementation="xla")
    calls = (
        lambda **how: fp8_attention(q, k, v, **how),
        lambda **how: flash_attention(x.q, x.k, x.v, scales=x.scales, **how),
    )
    for call_as in calls:
        with pytest.raises(ValueError, match=f"{words}.*to bfloat16.*='xla' computes"):
            call_as()
        with pytest.raises(ValueError, match=f"{words}.*implementation='xla' does"):
            call_as(implementation="cuda_sm90")
        with pytest.raises(ValueError, match="Hopper's kernels alone multiply 8 bits"):
            call_as(implementation="cuda")
        jax.jit(functools.partial(call_as, implementation="xla")).lower()


def test_bad_scales_make_nan(rng):
    x = quantize_qkv(*arrays(rng), FP8AttentionConfig("head", "head"))
    for bad in (-1.0, np.nan):
        scales = AttentionScales(x.scales.q.at[1, 2].set(bad), x.scales.k, x.scales.v)
        out = flash_attention(x.q, x.k, x.v, scales=scales, implementation="xla")
        reached = jnp.isnan(out).all((1, 3))
        assert reached[1, 2] and reached.sum() == 1


def scored(x, **options):
    return fp8_attention(*x, implementation="xla", **options).astype(jnp.float32).sum()


ORDERS = {
    "jvp": (lambda f, q: jax.jvp(f, (q,), (q,)), "reverse mode"),
    "jvp in jit": (
        lambda f, q: jax.jit(lambda q: jax.jvp(f, (q,), (q,)))(q),
        "reverse",
    ),
    "jacfwd": (lambda f, q: jax.jacfwd(f)(q), "reverse mode"),
    "linearize": (lambda f, q: jax.linearize(f, q)[1](q), "reverse mode"),
    "hessian": (lambda f, q: jax.hessian(f)(q), "reverse mode"),
    "reverse over reverse": (
        lambda f, q: jax.grad(lambda q: jax.grad(f)(q).astype(jnp.float32).sum())(q),
        "first ones",
    ),
    "forward over reverse": (
        lambda f, q: jax.jvp(jax.grad(f), (q,), (q,)),
        "",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_other_derivatives_are_refused_in_its_own_name(rng, name):
    q, k, v = arrays(rng, b=1, t=4, s=8, n=2, k=1, d=16)
    call, words = ORDERS[name]
    words = f"{words}|flash_attention of the arrays in bfloat16"
    check(
        "fp8_attention",
        NotImplementedError,
        words,
        lambda: call(lambda q: scored((q, k, v)), q),
    )


def test_gradients_under_transforms(rng):
    """Of one array alone, of members, in scans and with rematerialization."""
    q, k, v = arrays(rng, b=1, t=4, s=8, n=2, k=1, d=16)
    want = jax.grad(lambda q: scored((q, k, v)))(q)
    many = jnp.stack([q, q])

    def scanned(qs):
        step = jax.checkpoint(lambda c, q: (c + scored((q, k, v)), None))
        return jax.lax.scan(step, jnp.float32(0), qs)[0]

    for got in (
        jax.jit(jax.vmap(jax.grad(lambda q: scored((q, k, v)))))(many)[1],
        jax.grad(lambda qs: jax.vmap(lambda q: scored((q, k, v)))(qs).sum())(many)[1],
        jax.jit(jax.grad(scanned))(many)[1],
    ):
        assert same(got, want)
    # Who differentiates something else is not concerned.
    _, slope = jax.jvp(lambda a: a * scored((q, k, v)), (2.0,), (1.0,))
    assert slope == scored((q, k, v))


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@OF_SCORES
def test_scales_of_any_value(qk_dtype, rng, name, value):
    """As docs/fp8.md has it, of the second head of keys and its two of queries."""
    config = FP8AttentionConfig(qk_dtype=qk_dtype)
    x = quantize_qkv(*arrays(rng, b=1, t=4, s=8, n=4, k=2, d=16), config)
    scales = {n: np.array(getattr(x.scales, n)) for n in "qkv"}
    hurt = {n: a.copy() for n, a in scales.items()}
    heads = slice(2, 4) if name == "q" else slice(1, 2)
    hurt[name][:, heads] = value

    def run(scales, kind):
        given = AttentionScales(**{n: kind(a) for n, a in scales.items()})
        return flash_attention(x.q, x.k, x.v, scales=given, implementation="xla")

    if value == np.inf:
        words = f"scales.{name}[0, {heads.start}, 0] must be finite|got inf"
        check("flash_attention", ValueError, words, lambda: run(hurt, np.asarray))
        with jax_kvblock.debug_checks():
            check("flash_attention", ValueError, words, lambda: run(hurt, jnp.asarray))
    want = np.float32(run(scales, jnp.asarray))
    got = np.float32(run(hurt, jnp.asarray))
    np.testing.assert_array_equal(got[:, :, :2], want[:, :, :2])
    got = got[:, :, 2:]
    if value == 0:
        wide = np.float32(x.v) * scales["v"].transpose(0, 2, 1)[..., None]
        mean = np.broadcast_to(wide[:, :, 1:].mean(1, keepdims=True), got.shape)
        mean = np.zeros_like(mean) if name == "v" else mean
        np.testing.assert_allclose(got, mean, rtol=0, atol=0.01)
    elif value != np.inf:
        assert np.isnan(got).all()
    else:
        assert not np.isfinite(got).all()
