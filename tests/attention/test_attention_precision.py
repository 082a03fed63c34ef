"""`precision`: its names, who computes it, and that every transform carries it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_exact
from attention_model import F32, KERNELS, Call, draw, f64, truth
from jax.extend import core

from jax_kvblock import (
    attention_fn,
    dot_product_attention,
    flash_attention,
    flash_attention_backward,
    flash_attention_forward,
)
from jax_kvblock.attention import bhnd, cuda, dispatch
from jax_kvblock.attention.config import AttentionConfig, Operands
from jax_kvblock.attention.precision import resolve

LAX, PRESET = jax.lax.Precision, jax.lax.DotAlgorithmPreset
W = "flash_attention"
TF32 = "default"


@pytest.mark.parametrize(
    ("given", "means"),
    [
        (None, "highest"),
        ("highest", "highest"),
        ("float32", "highest"),
        (LAX.HIGHEST, "highest"),
        (PRESET.F32_F32_F32, "highest"),
        (PRESET.TF32_TF32_F32_X3, "highest"),
        ("BF16_BF16_F32_X3", "highest"),
        (("default", "highest"), "highest"),
        ("default", TF32),
        ("fastest", TF32),
        ("tensorfloat32", TF32),
        ("bfloat16_3x", TF32),  # which is HIGH, and TF32 on a GPU
        (LAX.DEFAULT, TF32),
        (LAX.HIGH, TF32),
        ("TF32_TF32_F32", TF32),
        (PRESET.BF16_BF16_F32, TF32),
        ((LAX.DEFAULT, LAX.HIGH), TF32),
    ],
)
def test_names_are_those_of_jax(given: Any, means: str) -> None:
    assert resolve(W, given, F32) == means
    assert resolve(W, given, jnp.bfloat16) == "highest"  # it makes no difference
    if isinstance(given, str) and given not in ("fastest", "bfloat16_3x"):
        with jax.default_matmul_precision(given):
            assert resolve(W, None, F32) == means
            assert resolve(W, "highest", F32) == "highest"


@pytest.mark.parametrize("given", ["fast", "tf32", 1, 0.5, ["default"], ("default",)])
def test_other_names_are_refused(given: Any) -> None:
    x = jnp.ones((1, 4, 1, 8))
    words = r"flash_attention: precision must be 'default' .*'highest' .*, got "
    with pytest.raises(ValueError, match=words + re.escape(repr(given))):
        flash_attention(x, x, x, precision=given)
    with pytest.raises(ValueError, match="precision must be"):  # also of 16 bits
        y = x.astype(jnp.bfloat16)
        flash_attention(y, y, y, precision=given)


# ---- who computes --------------------------------------------------------------------


def chosen(dtype: Any, implementation: str | None = None, **how: Any) -> str:
    """Of a call on a GPU; dim is that of keys and values."""
    dim, how = how.pop("dim", 64), how
    a = jax.ShapeDtypeStruct((1, 128, 2, dim), dtype)
    config = AttentionConfig(1.0, implementation=implementation)
    return dispatch.choose(config, Operands(a, a, a), "cuda", **how)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda, "best_kernels", lambda: ("cuda_sm90", "cuda"))
    monkeypatch.setattr(cuda, "unserved_by_gpu", lambda *_: [])
    monkeypatch.setattr(dispatch.ffi, "require_cuda_build", lambda: None)
    yield


def test_kernels_serve_float32(hopper: None) -> None:
    assert chosen(jnp.bfloat16) == "cuda_sm90"
    assert chosen(F32) == chosen(F32, backward=True) == "cuda"
    assert chosen(F32, dim=256) == "cuda"
    assert chosen(F32, dim=136, backward=True) == "xla"
    assert chosen(jnp.float64) == "xla"


def test_who_does_not_serve_float32_says_who_does(hopper: None) -> None:
    words = "'cuda_sm90' does not serve dtype float32 .*'cuda' and 'xla' do"
    with pytest.raises(ValueError, match=words):
        chosen(F32, "cuda_sm90")
    words = "'cuda' does not serve gradients of float32 .*136 .*128.*='xla' does"
    with pytest.raises(ValueError, match=words):
        chosen(F32, "cuda", dim=136, backward=True)
    words = "'cuda' does not serve dtype float64 .*float32 are served"
    with pytest.raises(ValueError, match=words):
        chosen(jnp.float64, "cuda")


def test_tiles_of_the_kernels_ask_for_them_in_float32(hopper: None) -> None:
    x = jnp.zeros((1, 1, 32, 64))
    for tile, implementation, kernels in (
        ((64, 128), None, "cuda"),  # its own
        ((128, 192), None, "cuda"),  # that of Hopper's kernels for 16 bits
        ((128, 128), None, "cuda"),
        ((32, 32), None, "cuda"),  # the default
        ((32, 64), "xla", ""),
    ):
        config, _ = bhnd._call("here", x, x, x, *tile, False)
        assert (config.implementation, config.kernels) == (implementation, kernels)
    half, _ = bhnd._call("here", x, x, x, 64, 128, True)  # no tile of 16 bits
    assert half.implementation == "xla"


# ---- it is carried -------------------------------------------------------------------


def configs(function: Any, *arguments: Any) -> list[AttentionConfig]:
    """Those of all attention operations of a program."""
    found = []

    def look(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if "kvblock_attention" in eqn.primitive.name:
                found.append(eqn.params["call"].config)
            for inner in core.jaxprs_in_params(eqn.params):
                look(inner)

    look(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


ARRAYS = tuple(jnp.ones(shape) for shape in ((2, 8, 2, 8), (2, 8, 1, 8), (2, 8, 1, 8)))


def plain(q: Any, k: Any, v: Any) -> Any:
    return flash_attention(q, k, v, precision=TF32)


def with_bias(q: Any, k: Any, v: Any) -> Any:
    bias = jnp.zeros((1, 1, 8, 8)) + q[0, :, 0, :1]
    return flash_attention(q, k, v, bias=bias, return_lse=True, precision=TF32)


def total(f: Any) -> Any:
    return lambda *x: sum(y.sum() for y in jax.tree.leaves(f(*x)))


TRANSFORMS = {
    "jit": lambda f: jax.jit(f),
    "grad": lambda f: jax.grad(total(f), (0, 1, 2)),
    "grad of grad": lambda f: jax.grad(lambda *x: jax.grad(total(f))(*x).sum()),
    "jvp": lambda f: lambda *x: jax.jvp(f, x, x),
    "jvp of grad": lambda f: lambda *x: jax.jvp(jax.grad(total(f)), x, x),
    "vmap": lambda f: lambda *x: jax.vmap(f)(*(jnp.stack([a, a]) for a in x)),
    "vmap of grad": lambda f: (
        lambda *x: jax.vmap(jax.grad(total(f)))(*(jnp.stack([a, a]) for a in x))
    ),
    "checkpoint": lambda f: jax.grad(total(jax.checkpoint(f))),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", [plain, with_bias])
def test_transforms_carry_it(call: Any, transform: str) -> None:
    found = configs(TRANSFORMS[transform](call), *ARRAYS)
    assert found and {config.precision for config in found} == {TF32}


def test_what_has_no_argument_for_it_follows_jax() -> None:
    x = jnp.ones((1, 32, 2, 8))
    calls = (flash_attention, dot_product_attention, flash_attention_forward)
    for call in calls:
        (config,) = configs(lambda x, call=call: call(x, x, x), x)
        assert config.precision == "highest"
        with jax.default_matmul_precision("tensorfloat32"):
            (config,) = configs(lambda x, call=call: call(x, x, x), x)
        assert config.precision == TF32


def test_flax_hands_it_on() -> None:
    x = jnp.ones((1, 8, 2, 8))
    for given, means in ((None, "highest"), ("default", TF32), (LAX.HIGH, TF32)):
        (config,) = configs(lambda x, g=given: attention_fn(x, x, x, precision=g), x)
        assert config.precision == means


def test_programs_of_both_precisions_are_two() -> None:
    call = jax.jit(flash_attention)
    x = jnp.ones((1, 8, 2, 8))
    first = call.lower(x, x, x).as_text()
    with jax.default_matmul_precision("default"):
        second = call.lower(x, x, x).as_text()
    assert first != second


def test_plain_jax_obeys_it() -> None:
    def products(precision: str) -> set[str]:
        def slopes(q: Any, k: Any, v: Any) -> Any:
            call = lambda *x: flash_attention(  # noqa: E731
                *x, precision=precision, implementation="xla"
            )
            out, pull = jax.vjp(call, q, k, v)
            return pull(out)

        text = jax.jit(slopes).lower(*ARRAYS).as_text()
        return set(re.findall(r"dot_general.*precision = \[(.*?)\]", text))

    assert products("highest") == {"HIGHEST, HIGHEST"}
    assert products(TF32) == {"DEFAULT, DEFAULT"}


@pytest.mark.parametrize(("precision", "number"), [("highest", 0), (TF32, 1)])
def test_the_launchers_are_told(precision: str, number: int) -> None:
    def slopes(q: Any, k: Any, v: Any) -> Any:
        call = lambda *x: flash_attention(  # noqa: E731
            *x, precision=precision, implementation="cuda", deterministic=True
        )
        out, pull = jax.vjp(call, q, k, v)
        return pull(out)

    traced = jax.jit(slopes).trace(*ARRAYS)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    told = re.findall(r"@kvblock_attention_(\w+)\(.*?precision = (\d) :", text)
    assert sorted(told) == [
        (name, str(number)) for name in ("backward_kv", "backward_q", "forward")
    ]


# ---- the kernels by JAX's calls, on the emulator -------------------------------------


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def found_by_kernels(call: Call, precision: str, **static: Any) -> dict[str, Any]:
    def attend(arrays: Any) -> Any:
        return flash_attention(
            **arrays,
            **call.operands,
            **call.static,
            **static,
            precision=precision,
            implementation="cuda",
            return_lse=True,
        )

    (out, lse), pull = jax.vjp(attend, call.arrays)
    (grads,) = pull(call.cotangents)
    return {"out": out, "lse": lse, **{f"d_{n}": x for n, x in grads.items()}}


def off(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(np.linalg.norm(f64(x) - want[name]) / np.linalg.norm(want[name]))
        for name, x in got.items()
    }


def small(rng: np.random.Generator, **options: Any) -> Call:
    sizes = {"batch": 1, "q_len": 40, "kv_len": 50, "heads": 2, "kv_heads": 1}
    return draw(rng, F32, **sizes, dim=64, **options)


@pytest.mark.wide
@pytest.mark.parametrize("precision", ["highest", TF32])
def test_calls_reach_the_kernels(float32_as_cuda, rng, precision: str) -> None:
    call = small(rng, causal=True)
    call = call.replace(bias=jnp.asarray(rng.standard_normal((1, 2, 40, 50)), F32))
    least, most = (1e-8, 3e-6) if precision == "highest" else (1e-5, 2e-3)
    for deterministic in (False, True):
        got = found_by_kernels(call, precision, deterministic=deterministic)
        for name, error in off(got, truth(call)).items():
            bounds = (0.0, most) if name == "lse" else (least, most)
            assert bounds[0] < error < bounds[1], name


def test_the_default_tile_reaches_the_kernels(float32_as_cuda, rng) -> None:
    """Of both functions, with what one hands to the other."""
    q, k, v, dout = (
        jnp.asarray(rng.standard_normal((1, 2, 40, 64)), F32) for _ in range(4)
    )
    weights = np.exp(np.einsum("bhtd,bhsd->bhts", f64(q), f64(k)) / 8)
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhts,bhsd->bhtd", weights, f64(v))
    dp = np.einsum("bhtd,bhsd->bhts", f64(dout), f64(v))
    ds = weights * (dp - (f64(dout) * out).sum(-1, keepdims=True)) / 8
    want = {
        "out": out,
        "dq": np.einsum("bhts,bhsd->bhtd", ds, f64(k)),
        "dk": np.einsum("bhts,bhtd->bhsd", ds, f64(q)),
        "dv": np.einsum("bhts,bhtd->bhsd", weights, f64(dout)),
    }
    for precision, least, most in (("highest", 1e-8, 3e-6), (TF32, 1e-5, 2e-3)):
        with jax.default_matmul_precision(precision):
            got, *rest = flash_attention_forward(q, k, v, return_residuals=True)
            grads = flash_attention_backward(q, k, v, got, dout, *rest)
        found = {"out": got, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
        for name, error in off(found, want).items():
            assert least < error < most, (precision, name)


@pytest.mark.wide
def test_members_of_vmap_reach_the_kernels(float32_as_cuda, rng) -> None:
    calls = [small(rng) for _ in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(call.arrays for call in calls))
    attend = lambda x: flash_attention(**x, implementation="cuda")  # noqa: E731
    for precision, least, most in (("highest", 1e-8, 3e-6), (TF32, 1e-5, 2e-3)):
        with jax.default_matmul_precision(precision):
            out = jax.vmap(attend)(stacked)
        for got, call in zip(out, calls, strict=True):
            (error,) = off({"out": got}, truth(call)).values()
            assert least < error < most


# ---- on a GPU ------------------------------------------------------------------------

HAS_KERNELS = "cuda" in KERNELS


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_KERNELS, reason="no CUDA kernels here")
@pytest.mark.parametrize("dim", [8, 64, 72, 128])
@pytest.mark.parametrize("sizes", [(1, 129), (127, 65), (200, 333), (1030, 1100)])
def test_the_highest_precision_is_as_good_as_plain_jax(rng, sizes, dim) -> None:
    t, s = sizes
    call = draw(rng, F32, batch=1, q_len=t, kv_len=s, heads=4, kv_heads=2, dim=dim)
    assert_exact(call.replace(causal=True, q_offset=jnp.int32(max(0, s - t))), "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_KERNELS, reason="no CUDA kernels here")
@pytest.mark.parametrize("dim", [136, 200, 256])
def test_wide_heads_have_kernels_forward(rng, dim) -> None:
    call = draw(rng, F32, batch=1, q_len=70, kv_len=130, dim=dim)
    assert_exact(call.replace(causal=True), "cuda", gradients=False)
    assert_exact(call.replace(causal=True), None)  # gradients by blocks of plain JAX


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_KERNELS, reason="no CUDA kernels here")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_errors_are_those_of_the_precision(rng, dim, deterministic) -> None:
    call = draw(rng, F32, batch=1, q_len=300, kv_len=500, dim=dim)
    want = truth(call)
    for precision, least, most in (("highest", 0.0, 4e-6), (TF32, 1e-4, 2e-3)):
        got = found_by_kernels(call, precision, deterministic=deterministic)
        for name, error in off(got, want).items():
            assert error < most, (precision, name)
            assert error > least or name == "lse", (precision, name)
