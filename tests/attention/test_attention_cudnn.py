"""implementation="cudnn": jax.nn's cuDNN call means what flash_attention means."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close
from attention_model import (
    BF16,
    F16,
    cast,
    draw,
    draw_bias,
    f64,
    truth,
    who_attends,
)

from jax_kvblock import dot_product_attention, flash_attention

pytestmark = pytest.mark.gpu

SHAPE = {"q_len": 128, "kv_len": 192, "dim": 64}
i32 = lambda *x: jnp.asarray(x, jnp.int32)  # noqa: E731
OPTIONS = {
    "nothing": {},
    "causal": {"causal": True},
    "a window": {"window": (40, 0)},
    "a causal window": {"causal": True, "window": (70, None)},
    "a scale": {"scale": 0.3},
    "lengths": {"q_lens": i32(128, 77), "kv_lens": i32(90, 192)},
    "causal lengths": {"causal": True, "q_lens": i32(128, 77), "kv_lens": i32(90, 192)},
    "no groups": {},
}


def out_and_gradients(call: Any, attend: Any) -> dict[str, Any]:
    out, pull = jax.vjp(attend, call.arrays)
    (grads,) = pull(call.cotangents[0])
    return {"out": out, **{f"d_{name}": grad for name, grad in grads.items()}}


def draw_call(rng: Any, dtype: Any, name: str) -> Any:
    """Cotangents are 0 for rows that do not exist, and for lse, which cuDNN keeps."""
    heads = {"kv_heads": 4} if name == "no groups" else {}
    call = draw(rng, dtype, **SHAPE, **heads).replace(**OPTIONS.get(name, {}))
    if name == "a bias":
        call = call.replace(bias=draw_bias(rng, call, (False, False), dtype))
    _, alive = who_attends(call)
    d_out, d_lse = call.cotangents
    d_out = cast(f64(d_out) * alive[..., None, None], dtype)
    return dataclasses.replace(call, cotangents=(d_out, d_lse * 0))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*OPTIONS, "a bias"])
def test_values_and_gradients(rng, dtype, name) -> None:
    call = draw_call(rng, dtype, name)

    def attend(arrays: Any) -> jax.Array:
        return flash_attention(
            **arrays, **call.operands, **call.static, implementation="cudnn"
        )

    got = out_and_gradients(call, jax.jit(attend))
    want = truth(call)
    _, alive = who_attends(call)
    rows = alive[..., None, None]
    assert_close(np.where(rows, f64(got["out"]), 0), want["out"], dtype)
    for array in call.arrays:
        assert_close(got[f"d_{array}"], want[f"d_{array}"])


@pytest.mark.parametrize("causal", [False, True])
def test_the_residual_of_the_drop_in(rng, causal) -> None:
    """Out and lse, as jax.nn orders them."""
    call = draw(rng, BF16, **SHAPE).replace(causal=causal)
    out, lse = dot_product_attention(
        *call.arrays.values(),
        is_causal=causal,
        implementation="cudnn",
        return_residual=True,
    )
    want = truth(call)
    assert out.dtype == BF16 and lse.dtype == BF16  # as jax.nn's
    assert_close(out, want["out"])
    assert_close(lse, want["lse"])
