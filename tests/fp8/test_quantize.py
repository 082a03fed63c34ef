"""`quantize_qkv` against float64: in plain JAX, by the emulated kernels, on a GPU."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import by_axis_type, mesh_of
from quantize_truth import hold
from settings import SETTINGS

from jax_kvblock import AttentionScales, flash_attention
from jax_kvblock.fp8 import FP8AttentionConfig, fp8_attention, quantize_qkv
from jax_kvblock.fp8.quantize import QuantizedQKV

OF_CODES = pytest.mark.parametrize("qk_dtype", ["float8_e4m3fn", "int8"])
LENS = {"q_lens": np.array([300, 131]), "kv_lens": np.array([259, 17])}
CONFIGS = {
    f"{qk_dtype}, " * (qk_dtype == "int8")
    + f"{queries}, {keys}, {values}{', smooth' * smooth}{', rotate' * rotate}": (
        FP8AttentionConfig(queries, keys, values, smooth, rotate, qk_dtype)
    )
    for qk_dtype in ("float8_e4m3fn", "int8")
    for queries, keys, values in (
        ("block", "block", "head"),
        ("head", "tensor", "tensor"),
        ("tensor", "head", "head"),
    )
    for smooth in (False, True)
    for rotate in (False, True)
}
by_config = pytest.mark.parametrize("name", CONFIGS)


def arrays(rng, b=2, t=300, s=260, n=4, k=2, d=64, e=None, dtype="bfloat16"):
    shapes = (b, t, n, d), (b, s, k, d), (b, s, k, e or d)
    q, keys, v = (rng.normal(size=x) for x in shapes)
    return [jnp.asarray(x, dtype) for x in (q, keys + 2, v)]


def judge(
    x: QuantizedQKV, q: Any, k: Any, v: Any, config: Any = None, **lens: Any
) -> None:
    """Every code and scale, and the products with the mean."""
    config = config or FP8AttentionConfig()
    q_lens, kv_lens = lens.get("q_lens"), lens.get("kv_lens")
    rows = np.full(len(k), k.shape[1]) if kv_lens is None else np.asarray(kv_lens)
    q, k, v = (np.asarray(a) for a in (q, k, v))
    group = q.shape[2] // k.shape[2]
    mean = None
    if config.smooth_keys:
        there = np.arange(k.shape[1]) < rows[:, None]
        wide = np.where(there[..., None, None], k.astype(np.float64), 0)
        truth = wide.sum(1) / np.maximum(rows, 1)[:, None, None]
        mean = truth.astype(np.float32)
        queries = np.asarray(q, np.float64)
        if q_lens is not None:
            beyond = np.arange(q.shape[1]) >= np.asarray(q_lens)[:, None]
            queries = np.where(beyond[..., None, None], 0, queries)
        of_each = np.repeat(truth, group, 1)
        shift = np.einsum("btnd,bnd->btn", queries, of_each)
        np.testing.assert_allclose(x.shift, shift, rtol=1e-4, atol=1e-3)
    else:
        assert x.shift is None
    how = {"turned": config.rotate, "integers": config.qk_dtype == "int8"}
    hold_one(x, "q", q, None, shared=config.queries, lens=q_lens, **how)
    hold_one(x, "k", k, mean, shared=config.keys, lens=kv_lens, **how)
    hold_one(x, "v", v, None, shared=config.values, lens=kv_lens)


def hold_one(x: QuantizedQKV, name: str, a: Any, mean: Any, **how: Any) -> None:
    codes, scales = np.asarray(getattr(x, name)), np.asarray(getattr(x.scales, name))
    hold(a, codes, scales, mean, **how)


def alike(x: QuantizedQKV, y: QuantizedQKV) -> None:
    """But for sums in another order."""
    a, b = jax.tree.leaves(x), jax.tree.leaves(y)
    for one, other in zip(a, b, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        wide = [np.asarray(z.astype(jnp.float32)) for z in (one, other)]
        off = np.linalg.norm(wide[0] - wide[1]) / (np.linalg.norm(wide[1]) + 1e-30)
        assert off < 2e-3


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@by_config
def test_every_config(name, dtype, quantized_by, rng):
    given = arrays(rng, dtype=dtype)
    judge(quantize_qkv(*given, CONFIGS[name]), *given, CONFIGS[name])


@by_config
def test_lengths(name, quantized_by, rng):
    """Rows beyond them are NaN."""
    given = [np.asarray(x).copy() for x in arrays(rng)]
    for x, lens in zip(given, ("q_lens", "kv_lens", "kv_lens"), strict=True):
        x[np.arange(x.shape[1]) >= LENS[lens][:, None]] = np.nan
    for lens in (LENS, {"kv_lens": LENS["kv_lens"]}, {"q_lens": LENS["q_lens"]}):
        used = [
            np.where(np.isnan(x), 0, x) if which not in lens else x
            for x, which in zip(given, ("q_lens", "kv_lens", "kv_lens"), strict=True)
        ]
        made = quantize_qkv(*used, CONFIGS[name], **lens)
        judge(made, *used, CONFIGS[name], **lens)


@pytest.mark.parametrize(
    ("d", "e"),
    [(128, 128), (16, 16), (32, 48), (96, 80), (112, 128), (40, 40), (200, 8)],
)
def test_head_dims(d, e, quantized_by, rng):
    """Some that the kernels do not serve."""
    given = arrays(rng, d=d, e=e)
    judge(quantize_qkv(*given), *given)


def test_nothing_to_quantize(quantized_by, rng):
    given = arrays(rng, s=0)
    made = quantize_qkv(*given)
    assert made.k.shape == (2, 0, 2, 64) and (made.scales.k == 1).all()
    judge(made, *given)
    for config in CONFIGS.values():
        none = quantize_qkv(*arrays(rng, b=0), config)
        assert none.q.shape == (0, 300, 4, 64) and none.scales.v.shape == (0, 2, 1)
    assert fp8_attention(*arrays(rng, b=0), implementation="xla").shape[0] == 0


def test_what_is_divided_alone_has_the_bits_of_plain_jax(quantized_by, rng):
    given = arrays(rng)
    config = FP8AttentionConfig(smooth_keys=False, rotate=False)
    one, other = (
        quantize_qkv(*given, config, implementation=by) for by in (None, "xla")
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if quantized_by != "gpu":  # where XLA's divisions are not exact
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# ---- transforms ----------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(setting, quantized_by, rng):
    given = arrays(rng)
    with SETTINGS[setting]():
        judge(quantize_qkv(*given), *given)
        judge(jax.jit(quantize_qkv)(*given), *given)


@OF_CODES
@pytest.mark.parametrize(
    "axes", [(0, 0, 0), (1, None, None), (None, 0, None), (2, 1, 0)]
)
def test_vmap(axes, qk_dtype, quantized_by, rng):
    """What no axis runs over is quantized once."""
    members = [arrays(rng, b=2) for _ in range(3)]
    given = [
        members[0][i] if axis is None else jnp.stack([m[i] for m in members], axis)
        for i, axis in enumerate(axes)
    ]
    config = FP8AttentionConfig(qk_dtype=qk_dtype)
    quantize = functools.partial(quantize_qkv, config=config, **LENS)
    made = jax.jit(jax.vmap(quantize, axes))(*given)
    for at in range(3):
        one = [members[0 if a is None else at][i] for i, a in enumerate(axes)]
        judge(jax.tree.map(lambda x, at=at: x[at], made), *one, config, **LENS)


def test_vmap_of_lengths_alone(quantized_by, rng):
    given = arrays(rng)
    lens = np.array([[260, 3], [0, 140]])
    made = jax.vmap(lambda n: quantize_qkv(*given, kv_lens=n))(lens)
    for at in range(2):
        one = jax.tree.map(lambda x, at=at: x[at], made)
        judge(one, *given, kv_lens=lens[at])


def test_scan(quantized_by, rng):
    given = arrays(rng)

    def step(_, x):
        return None, quantize_qkv(*(a[None] for a in x))

    _, made = jax.lax.scan(step, None, tuple(given))
    alike(jax.tree.map(lambda x: x[:, 0], made), quantize_qkv(*given))


@OF_CODES
def test_export(qk_dtype, quantized_by, rng):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    given = arrays(rng)
    config = FP8AttentionConfig(qk_dtype=qk_dtype)
    check = jax.export.DisabledSafetyCheck.custom_call("kvblock_quantize")
    platform = "cuda" if quantized_by == "gpu" else "cpu"
    exported = jax.export.export(
        jax.jit(lambda *x: jax.tree.leaves(quantize_qkv(*x, config))),
        platforms=[platform],
        disabled_checks=[check],
    )(*given)
    made = jax.export.deserialize(exported.serialize()).call(*given)
    for a, b in zip(made, jax.tree.leaves(quantize_qkv(*given, config)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_derivatives_are_those_of_plain_jax(quantized_by, rng):
    given = arrays(rng)

    def loss(by, q, k):
        x = quantize_qkv(q, k, given[2], implementation=by)
        return x.scales.q.sum() + x.scales.k.sum() + x.shift.sum()

    mine, its = (jax.grad(loss, (1, 2))(by, *given[:2]) for by in (None, "xla"))
    for a, b in zip(mine, its, strict=True):
        off = jnp.linalg.norm((a - b).astype(jnp.float32))
        assert off <= 0.01 * jnp.linalg.norm(b.astype(jnp.float32))
    kept = jax.lax.stop_gradient
    slope = jax.grad(
        lambda q: (quantize_qkv(kept(q), *given[1:]).shift.sum() * q).sum()
    )
    assert jnp.isfinite(slope(given[0])).all()


def test_the_kernels_have_no_derivatives(quantize_as_cuda, rng):
    q, k, v = arrays(rng)
    with pytest.raises(NotImplementedError, match="implementation='cuda' has no deriv"):
        jax.grad(lambda q: quantize_qkv(q, k, v, implementation="cuda").scales.q.sum())(
            q
        )


def test_attention_over_it(quantized_by_cpus, rng):
    """Not by the name of plain JAX, so that the kernels quantize."""
    q, k, v = arrays(rng)
    x = quantize_qkv(q, k, v, **LENS)
    options = dict(causal=True, return_lse=True, **LENS)
    out, lse = fp8_attention(q, k, v, implementation="xla", **options)
    its, its_lse = flash_attention(
        x.q, x.k, x.v, scales=x.scales, implementation="xla", **options
    )
    off = jnp.linalg.norm((out - its).astype(jnp.float32))
    assert off <= 0.01 * jnp.linalg.norm(its.astype(jnp.float32))
    there = np.isfinite(lse)
    np.testing.assert_allclose(
        lse[there], (its_lse + x.shift / 8)[there], rtol=1e-3, atol=0.01
    )


# ---- several devices -----------------------------------------------------------------

CUT = {
    "batch": ("b", None, None),
    "heads": (None, None, "h"),
    "batch and heads": ("b", None, "h"),
}
TRAVELS = r"all-gather|all-reduce|all-to-all|collective"


def cut_of(mesh: Any, given: list[Any], spec: Any) -> list[Any]:
    return [jax.device_put(x, NamedSharding(mesh, P(*spec))) for x in given]


@pytest.mark.parametrize("where", CUT)
@by_axis_type
@OF_CODES
def test_meshes(qk_dtype, axis_type, where, quantized_by_cpus, rng):
    """Nothing travels between heads and members."""
    given = arrays(rng)
    mesh = mesh_of(axis_type)
    placed = cut_of(mesh, given, CUT[where])
    config = FP8AttentionConfig(keys="head", qk_dtype=qk_dtype)

    def codes(*x):  # shift is computed by XLA, as it likes
        made = quantize_qkv(*x, config)
        return made.q, made.k, made.v, made.scales

    with jax.set_mesh(mesh):
        compiled = jax.jit(codes).lower(*placed).compile()
        made = jax.jit(codes)(*placed)
    assert not re.search(TRAVELS, compiled.as_text())
    b, _, h = CUT[where]
    for x in made[:3]:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P(b, None, h)), 4)
    for x in jax.tree.leaves(made[3]):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P(b, h)), 3)
    judge(QuantizedQKV(*made, quantize_qkv(*given).shift), *given, config)


@pytest.mark.parametrize(
    "spec", [(None, "h"), (None, None, "h")], ids=["rows", "heads"]
)
@pytest.mark.parametrize("implementation", [None, "xla"])
@by_axis_type
def test_what_has_to_be_whole_is_put_together(
    axis_type, implementation, spec, quantized_by_cpus, rng
):
    """Rows that are cut, and heads that share a scale."""
    given = arrays(rng)
    config = FP8AttentionConfig("tensor", "tensor", "tensor")
    mesh = mesh_of(axis_type)
    placed = cut_of(mesh, given, spec)

    def quantized(*x):
        return quantize_qkv(*x, config, implementation=implementation)

    with jax.set_mesh(mesh):
        made = jax.jit(quantized)(*placed)
    judge(made, *given, config)


@pytest.mark.parametrize("spec", [("b", None, "h"), ("b", "h")], ids=["heads", "rows"])
@pytest.mark.parametrize("implementation", [None, "xla"])
@by_axis_type
def test_codes_and_gradients_are_cut_by_heads_that_share_a_scale(
    axis_type, implementation, spec, quantized_by_cpus, rng
):
    """And what the log-sum-exp lacks is cut as attention's is."""
    given = arrays(rng, t=32, s=32, d=16)
    config = FP8AttentionConfig("tensor", "tensor", "tensor")
    mesh = mesh_of(axis_type)
    placed = cut_of(mesh, given, spec)

    def loss(*x):
        made = fp8_attention(*x, config, return_lse=True, implementation="xla")
        return sum(a.astype(jnp.float32).sum() for a in made)

    with jax.set_mesh(mesh):
        codes = jax.jit(
            lambda *x: quantize_qkv(*x, config, implementation=implementation).k
        )(*placed)
        slopes = jax.jit(jax.grad(loss, (0, 1, 2)))(*placed)
    if axis_type is AxisType.Explicit:
        cut = NamedSharding(mesh, P("b", None, *spec[2:]))
        assert codes.sharding.is_equivalent_to(cut, 4)
    for a, b in zip(slopes, jax.grad(loss, (0, 1, 2))(*given), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), 0.02)


def test_more_devices_than_key_heads(quantized_by_cpus, rng):
    """Queries come cut by four, and there are two key heads: XLA finds a way."""
    given = arrays(rng)
    q = cut_of(mesh_of(), given[:1], (None, None, ("b", "h")))
    rest = cut_of(mesh_of(), given[1:], (None, None, "h"))
    judge(jax.jit(quantize_qkv)(*q, *rest), *given)


def test_shard_map(quantized_by_cpus, rng):
    given = arrays(rng)
    mesh = mesh_of()
    spec = P("b", None, "h")
    of_scales = AttentionScales(*[P("b", "h")] * 3)
    mapped = jax.shard_map(
        lambda *x: quantize_qkv(*x),
        mesh=mesh,
        in_specs=spec,
        out_specs=QuantizedQKV(spec, spec, spec, of_scales, spec),
    )
    judge(jax.jit(mapped)(*given), *given)


# ---- who computes --------------------------------------------------------------------


def lowered(rng, config=None, by=None, **changes) -> str:
    given = arrays(rng, **changes)
    call = jax.jit(lambda *x: quantize_qkv(*x, config, implementation=by))
    return call.trace(*given).lower(lowering_platforms=("cuda",)).as_text()


def test_on_a_gpu_it_is_one_call(rng):
    assert len(re.findall(r"custom_call @kvblock_quantize\(", lowered(rng))) == 1
    assert "kvblock_quantize" in lowered(rng, by="cuda")
    assert "custom_call @kvblock_quantize(" not in lowered(rng, by="xla")


def test_attention_takes_the_kernels(rng):
    given = arrays(rng)
    attend = jax.jit(functools.partial(fp8_attention, implementation="cuda_sm90"))
    text = attend.trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @kvblock_quantize\(", text)) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, r"does not serve dtype float32 \(bfloat16 and float16"),
        ({"d": 40}, r"does not serve head dim 40 \(multiples of 16 up to 128 are\)"),
        ({"e": 256}, "does not serve head dim 256"),
    ],
)
def test_what_no_kernel_serves_goes_elsewhere_or_is_an_error(changes, said, rng):
    assert "custom_call @kvblock_quantize(" not in lowered(rng, **changes)
    with pytest.raises(ValueError, match=f"quantize_qkv: implementation='cuda' {said}"):
        lowered(rng, by="cuda", **changes)


def test_a_cpu_has_no_kernel(rng, four_cpus):
    with pytest.raises(ValueError, match="'cuda' needs an NVIDIA GPU, and this is low"):
        quantize_qkv(*arrays(rng), implementation="cuda")
    with pytest.raises(ValueError, match="implementation must be one of 'cuda', 'xla'"):
        quantize_qkv(*arrays(rng), implementation="kernel")
