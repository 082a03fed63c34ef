"""What the FFI handler of the append refuses: calls that do not fit together.

The package makes none of them. A program that was exported elsewhere, or calls the
target by itself, may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from append_cases import CASES, Drawn

from jax_kvblock.append import cuda
from jax_kvblock.append.call import NAMES

pytestmark = pytest.mark.usefixtures("as_cuda")


class Call:
    """A call as the handler gets it: operands by name, results, attributes."""

    def __init__(
        self, names: Sequence[str], operands: Any, results: Any, attributes: Any
    ) -> None:
        self.names, self.operands = list(names), list(operands)
        self.results, self.attributes = list(results), dict(attributes)

    def change(self, name: str, change: Callable[[Any], Any], nth: int = 0) -> None:
        at = [i for i, own in enumerate(self.names) if own == name][nth]
        self.operands[at] = change(self.operands[at])

    def present(self, *names: str) -> None:
        """Says that these operands are there, or are not any more."""
        for name in names:
            self.attributes["present"] ^= np.int64(1 << NAMES.index(name))

    def result(self, at: int, shape: Any = None, dtype: Any = None) -> None:
        old = self.results[at]
        self.results[at] = jax.ShapeDtypeStruct(
            old.shape if shape is None else shape, dtype or old.dtype
        )


def flat(x: Any) -> Any:
    return x.reshape(-1)


def longer(x: Any) -> Any:
    return jnp.concatenate([x, x[:1]])


def wider(x: Any) -> Any:
    return jnp.concatenate([x, x[..., :1]], -1)


def as_int16(x: Any) -> Any:
    return x.astype(jnp.int16)


def changed(name: str, change: Callable[[Any], Any], nth: int = 0) -> Any:
    return lambda call: call.change(name, change, nth)


def told(**attributes: Any) -> Any:
    return lambda call: call.attributes.update(attributes)


def number(at: int, value: int) -> Any:
    """Another of the pool's numbers (PoolNumbers)."""

    def change(call: Call) -> None:
        numbers = call.attributes["pool"].copy()
        numbers[at] = value
        call.attributes["pool"] = numbers

    return change


ATTRIBUTES = "the attributes do not fit"
OTHER = "has another shape or dtype than the call implies"
# By name: the case, what is wrong with it, and the message.
BAD: dict[str, tuple[str, Any, str]] = {
    "an operand that nobody knows": (
        "halves",
        lambda c: c.attributes.update(present=np.int64(1 << len(NAMES))),
        ATTRIBUTES,
    ),
    "no arrays": ("halves", told(num_pool=np.int64(0)), ATTRIBUTES),
    "few numbers": ("halves", told(pool=np.arange(5)), ATTRIBUTES),
    "a rotation below 0": ("halves", told(rotary_dim=np.int64(-2)), ATTRIBUTES),
    "no pool": ("halves", lambda c: c.present("pool"), ATTRIBUTES),
    "no slots": ("halves", lambda c: c.present("slots"), ATTRIBUTES),
    "neither k nor qkv": ("halves", lambda c: c.present("k"), ATTRIBUTES),
    "k beside qkv": ("joined", lambda c: c.present("k"), ATTRIBUTES),
    "q beside qkv": ("joined", lambda c: c.present("q"), "q and v are within qkv"),
    "k in two dims": ("halves", changed("k", flat), r"k is \[tokens, K, D\]"),
    "q in one dim": ("halves", changed("q", flat), r"q is \[tokens, N, D\]"),
    "q of another head dim": ("halves", changed("q", wider), f"q {OTHER}"),
    "more of v": ("halves", changed("v", longer), "v has k's shape and dtype"),
    "v of another dtype": ("halves", changed("v", as_int16), "v has k's shape and"),
    "qkv in one dim": ("joined", changed("qkv", flat), r"qkv is \[tokens, N \+ 2 K"),
    "qkv without queries": ("joined", number(3, 100), r"qkv is \[tokens, N \+ 2 K"),
    "arrays of two dtypes": (
        "HND, by layers, None",
        changed("pool", as_int16, 1),
        "the pool's arrays have one dtype",
    ),
    "more slots": ("halves", changed("slots", longer), f"slots {OTHER}"),
    "short slots": ("halves", changed("slots", as_int16), f"slots {OTHER}"),
    "more positions": ("halves", changed("positions", longer), f"positions {OTHER}"),
    "a row of layers": (
        "a traced layer",
        changed("layer", lambda x: x[None]),
        f"layer {OTHER}",
    ),
    "more frequencies": ("halves", changed("inv_freq", longer), f"inv_freq {OTHER}"),
    "a table of one dim": ("a table", changed("cos_sin", flat), r"cos_sin is \[rows"),
    "a wider table": ("a table", changed("cos_sin", wider), f"cos_sin {OTHER}"),
    "a longer norm": ("norms", changed("q_norm", longer), f"q_norm {OTHER}"),
    "a norm of integers": ("norms", changed("k_norm", as_int16), f"k_norm {OTHER}"),
    "a scale too many": (
        "e4m3 by heads",
        changed("k_scale", longer),
        f"k_scale {OTHER}",
    ),
    "a scale of integers": ("e4m3", changed("v_scale", as_int16), f"v_scale {OTHER}"),
    "scales of more blocks": (
        "e4m3 computed for one layer",
        changed("k_scales", longer),
        f"k_scales {OTHER}",
    ),
    "scales of more layers": (
        "e4m3 computed",
        changed("v_scales", longer),
        f"v_scales {OTHER}",
    ),
    "another result q": (
        "halves",
        lambda c: c.result(0, (*c.results[0].shape[:-1], 2)),
        f"result q {OTHER}",
    ),
    "a small pool": (
        "halves",
        lambda c: c.result(1, (1,)),
        "a pool is too small",
    ),
    "a result of a longer array": (
        "HND, by layers, None",
        changed("pool", longer, 1),
        "a result has another size than the operand that it updates",
    ),
    "a result of fewer scales": (
        "e4m3 computed",
        lambda c: c.result(-1, (1,)),
        "a result has another size than the operand that it updates",
    ),
    "more key heads than can be counted": (
        "joined",
        number(3, 2**62 + 1),
        r"qkv is \[tokens, N \+ 2 K",
    ),
    "no result of the pool": (
        "halves",
        lambda c: c.results.pop(),
        "result pool is missing",
    ),
    "no operand": ("halves", lambda c: c.operands.pop(), "inv_freq is missing"),
    "one operand more": (
        "halves",
        lambda c: c.operands.append(jnp.zeros(1)),
        "too many operands",
    ),
    "one result more": (
        "halves",
        lambda c: c.results.append(jax.ShapeDtypeStruct((1,), jnp.float32)),
        "too many results",
    ),
    "blocks outside of the pool": (
        "halves",
        number(1, 10**6),
        "append: the cache reaches",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name, monkeypatch, rng):
    case, spoil, message = BAD[name]
    real, names = jax.ffi.ffi_call, []
    attributes_of = cuda.attributes

    def attributes(call: Any, x: Any) -> Any:
        names[:] = call.operand_names
        return attributes_of(call, x)

    def ffi_call(target: str, results: Any, **_: Any) -> Any:
        def launch(*operands: Any, **attributes: Any) -> Any:
            call = Call(names, operands, results, attributes)
            spoil(call)
            run = real(target, call.results, has_side_effect=True)
            run(*call.operands, **call.attributes)
            return [jnp.zeros(x.shape, x.dtype) for x in results]

        return launch

    monkeypatch.setattr(cuda, "attributes", attributes)
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    with pytest.raises(Exception, match=f"kvblock_append: {message}"):
        jax.block_until_ready(Drawn(CASES[case], rng).rope_append())
