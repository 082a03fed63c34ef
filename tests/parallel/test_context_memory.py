"""How many bytes a device holds at a time, in attention over devices.

Programs are read as jaxprs, in their order, for more devices than there are here: what
is used again is there, a call of attention is one step, and a view of an array is that
array. XLA's own account for a CPU would be of plain JAX's products and of copies that
GPUs do not make; that for GPUs is looked at in test_gpu_schedules.py.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_calls import LAYOUTS
from jax.extend.core import Literal, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from test_context_programs import ORDERS, SENDS

from jax_kvblock.parallel import arguments, context_parallel_attention

pytestmark = pytest.mark.usefixtures("four_cpus")

# ---- what is there at a time ---------------------------------------------------------

SAME = ("reshape", "squeeze", "expand_dims", "transpose", "slice", "name", *ORDERS)
Storage = frozenset[int]  # numbers of arrays


class Program:
    """Steps of a jaxpr, and the arrays that each of them reads or makes."""

    def __init__(self, jaxpr: Any) -> None:
        self.sizes: list[int] = []
        self.steps: list[Storage] = []
        self.looks: list[int] = []
        given = [self.made(x) for x in jaxpr.invars]
        self.kept = Storage().union(*given)  # they are the caller's
        self.results = Storage().union(*self.walk(jaxpr, given))

    def made(self, x: Any) -> Storage:
        self.sizes.append(x.aval.size * x.aval.dtype.itemsize)
        return Storage({len(self.sizes) - 1})

    def walk(self, jaxpr: Any, given: list[Storage]) -> list[Storage]:
        known = dict(zip(jaxpr.invars, given, strict=True))

        def of(x: Any) -> Storage:
            return Storage() if isinstance(x, Literal) else known.get(x, Storage())

        for equation in jaxpr.eqns:
            each = [of(x) for x in equation.invars]
            inner = [*jaxprs_in_params(equation.params)]
            attention = hasattr(equation.params.get("call"), "config")
            if equation.primitive.name in SAME:
                made = each[: len(equation.outvars)]
            elif not attention and [len(x.invars) for x in inner] == [len(each)]:
                made = self.walk(inner[0], each)
            else:
                made = [self.made(x) for x in equation.outvars]
            self.steps.append(Storage().union(*each, *made))
            if attention or equation.primitive.name in SENDS:
                self.looks.append(len(self.steps) - 1)
            known |= zip(equation.outvars, made, strict=True)
        return [of(x) for x in jaxpr.outvars]

    def most(self) -> int:
        """Bytes, at the call of attention or the collective where they are most."""
        first, last = dict.fromkeys(self.kept, 0), {}
        for at, used in enumerate(self.steps):
            first = dict.fromkeys(used, at) | first
            last |= dict.fromkeys(used, at)
        last |= dict.fromkeys(self.kept | self.results, len(self.steps))
        there = [0] * len(self.steps)
        for array, begin in first.items():
            for at in range(begin, min(last[array] + 1, len(there))):
                there[at] += self.sizes[array]
        return max(there[at] for at in self.looks)


def of_device(f: Any, size: int, rows: Any, *shapes: Any) -> Program:
    """The function of one of `size` devices, given what all of them have."""
    mesh = AbstractMesh((size,), ("c",), (AxisType.Auto,))
    over = jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows)
    (whole,) = jax.make_jaxpr(over)(*shapes).jaxpr.eqns
    return Program(whole.params["jaxpr"])


def test_what_is_there_at_a_time():
    """The argument, what is sent, what has come, and what is used again."""
    send = lambda x: jax.lax.ppermute(x, "c", [(0, 1), (1, 0)])  # noqa: E731
    again = lambda x, y: x + send(jnp.sin(y))  # noqa: E731
    functions: list[tuple[Any, int]] = [
        (send, 2),
        (lambda x: send(jnp.sin(jnp.cos(x))), 3),
        (lambda x: send(x.reshape(2, 4)).reshape(8), 2),
        (lambda x: again(x, x), 3),
        (lambda x: again(y := jnp.cos(x), y), 4),
        (jax.jit(lambda x: jax.lax.all_gather(x, "c", tiled=True)), 3),
    ]
    for f, arrays in functions:
        found = of_device(f, 2, P("c"), jax.ShapeDtypeStruct((16,), jnp.float32))
        assert found.most() == arrays * 8 * 4


# ---- attention -----------------------------------------------------------------------

ROWS, HEADS, KV_HEADS, DIM = 96, 12, 3, 64  # of a device
ARRAY = 2 * ROWS * HEADS * DIM  # bytes of q, of out, and of their gradients
SHARD = 2 * 2 * ROWS * KV_HEADS * DIM  # of keys and values
LSE = 4 * ROWS * HEADS
HELD = 2 * ARRAY + SHARD + LSE  # what goes in, and what comes out
SMALL = 2048  # indices and lengths


def most_bytes(
    strategy: str, size: int, gradients: bool = False, packed: bool = False,
    layout: str = "zigzag", tuned: bool = False,
) -> int:  # fmt: skip
    """Of one of `size` devices. Out and lse are their own cotangents."""
    cu = {"cu_seqlens": np.int32([0, 32, ROWS]) * size} if packed else {}

    def attend(q: Any, k: Any, v: Any) -> Any:
        with mock.patch.object(arguments, "engines_can_send", lambda: tuned):
            return context_parallel_attention(
                q, k, v, axis_name="c", strategy=strategy, layout=layout, causal=True,
                compiler_options=tuned, return_lse=True, **cu,
            )  # fmt: skip

    def both(*x: Any) -> Any:
        results, pull = jax.vjp(attend, *x)
        return *results, *pull(results)

    shape = (size * ROWS,) if packed else (1, size * ROWS)
    given = [
        jax.ShapeDtypeStruct((*shape, n, DIM), jnp.bfloat16)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    ]
    rows = P("c") if packed else P(None, "c")
    return of_device(both if gradients else attend, size, rows, *given).most()


by_kind = pytest.mark.parametrize("packed", [False, True], ids=["batch", "documents"])
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
TUNED = (False, True)


@by_layout
@by_kind
def test_a_ring_holds_two_shards_of_others(packed, layout):
    """The one that is worked on and the next one, on any number of devices.

    And of out and lse two: what a call is given, and what it makes of that.
    """
    for tuned, (size, shards) in itertools.product(TUNED, ((2, 1), (3, 2), (8, 2))):
        most = most_bytes("ring", size, packed=packed, layout=layout, tuned=tuned)
        want = HELD + ARRAY + LSE + shards * SHARD
        assert want <= most <= want + SMALL, (size, tuned)


@by_layout
@by_kind
def test_gradients_of_a_ring_take_no_more_on_more_devices(packed, layout):
    """Two shards; their gradients: a call's, and in float32 those that came; and the
    queries', before a call and behind it.
    """
    most = HELD + 2 * ARRAY + LSE + 2 * SHARD + (1 + 2) * SHARD
    for tuned, size in itertools.product(TUNED, (2, 4, 8)):
        found = most_bytes("ring", size, True, packed, layout, tuned)
        assert found <= most + SMALL, (size, tuned)


@by_layout
@by_kind
def test_what_is_gathered_is_there_at_once(packed, layout):
    """A shard of each device, where a ring has a few."""
    size = 8
    for tuned in TUNED:
        how = {"packed": packed, "layout": layout, "tuned": tuned}
        assert most_bytes("all_gather", size, **how) >= HELD + size * SHARD
        for gradients in (False, True):
            ring, gathered = (
                most_bytes(name, size, gradients, **how)
                for name in ("ring", "all_gather")
            )
            assert gathered >= ring + (size - 4) * SHARD, (tuned, gradients)
