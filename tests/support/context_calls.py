"""Calls of attention over a sequence that is cut over devices, and their truth.

`compute` lays a call out over devices, runs it with all its gradients, and puts the
results back in the order of the sequence; `expected` is the truth. Both orders are
NumPy's, by their definition.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close
from attention_model import F32, Call, Results, cast, draw, jit, truth
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_kvblock.parallel import (
    arguments,
    compiler_options,
    context_parallel_attention,
)

STRATEGIES = ("ring", "all_gather", "ulysses", "ulysses_ring")
LAYOUTS = ("zigzag", "contiguous")


# ---- a call over devices -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a call is cut: over `size` devices.

    tuned: with `compiler_options()`, as if copy engines could send wherever it runs.
    """

    strategy: str = "ring"
    layout: str = "zigzag"
    size: int = 4
    tuned: bool = False

    def __str__(self) -> str:
        return f"{self.strategy} {self.layout}{' tuned' if self.tuned else ''}"


TUNED = ("ring", "all_gather")  # those that send in another way then
CUTS = (
    *(Cut(s, layout) for s in STRATEGIES for layout in LAYOUTS),
    *(Cut(s, layout, tuned=True) for s in TUNED for layout in LAYOUTS),
)


def mesh_of(size: int = 4, kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((size,), ("c",), (kind,), devices=jax.devices("cpu")[:size])


def zigzag_order(length: int, size: int, cu: Any = None) -> np.ndarray:
    """Which row of the sequence is row r of its zigzag: the definition, by loops.

    Rows before the first document and behind the last one are cut as documents are.
    """
    bounds = [0, length] if cu is None else [0, *map(int, cu), length]
    order: list[int] = []
    for device in range(size):
        for start, end in itertools.pairwise(bounds):
            chunk = (end - start) // (2 * size)
            for place in (device, 2 * size - 1 - device):
                first = start + place * chunk
                order += range(first, first + chunk)
    return np.asarray(order, np.int64)


def boundaries(call: Call) -> tuple[Any, Any]:
    """Those of the queries and of the keys; None where nothing is packed."""
    cu = call.operands.get("cu_seqlens")
    if isinstance(cu, tuple):
        return tuple(np.asarray(x) for x in cu)  # type: ignore[return-value]
    return (None, None) if cu is None else (np.asarray(cu),) * 2


def orders(call: Call, cut: Cut) -> tuple[Any, Any]:
    """From the sequence to its layout: of queries and of keys."""
    axis = 0 if is_packed(call) else 1
    lengths = (call.arrays[n].shape[axis] for n in "qk")
    if cut.layout == "contiguous":
        return tuple(map(np.arange, lengths))  # type: ignore[return-value]
    found = zip(lengths, boundaries(call), strict=True)
    return tuple(zigzag_order(n, cut.size, cu) for n, cu in found)  # type: ignore[return-value]


def is_packed(call: Call) -> bool:
    return "cu_seqlens" in call.operands


def taken(x: Any, order: np.ndarray, axis: int) -> jax.Array:
    return jnp.asarray(np.take(np.asarray(x), order, axis))


def laid_out(call: Call, cut: Cut) -> Call:
    """The call as its devices have it."""
    axis, (rows, keys) = 0 if is_packed(call) else 1, orders(call, cut)
    arrays = dict(call.arrays)
    for name, order in (("q", rows), ("k", keys), ("v", keys)):
        arrays[name] = taken(arrays[name], order, axis)
    operands = dict(call.operands)
    if (ids := operands.get("segment_ids")) is not None:
        pair = isinstance(ids, tuple)
        of_rows, of_keys = ids if pair else (ids, ids)
        both = taken(of_rows, rows, 1), taken(of_keys, keys, 1)
        operands["segment_ids"] = both if pair else both[0]
    cotangents = tuple(taken(x, rows, axis) for x in call.cotangents)
    return dataclasses.replace(
        call, arrays=arrays, operands=operands, cotangents=cotangents
    )


def put_back(results: Results, call: Call, cut: Cut) -> Results:
    """Results of `laid_out` calls in the order of the sequence."""
    axis, (rows, keys) = 0 if is_packed(call) else 1, orders(call, cut)
    order = {"out": rows, "lse": rows, "d_q": rows, "d_k": keys, "d_v": keys}
    back = {n: np.argsort(order[n]) for n in results if n in order}
    return {n: taken(x, back[n], axis) if n in back else x for n, x in results.items()}


def specs_of(call: Call, axis_name: Any = "c") -> tuple[Any, Any, Any]:
    """Of arrays, operands and rows: sequences are cut, all else is everywhere."""
    rows = P(axis_name) if is_packed(call) else P(None, axis_name)
    arrays = {n: rows if n in ("q", "k", "v") else P() for n in call.arrays}
    operands = {
        n: jax.tree.map(lambda _, n=n: rows if n == "segment_ids" else P(), x)
        for n, x in call.operands.items()
    }
    return arrays, operands, rows


def attend_as_cut(
    call: Call, cut: Cut, axis_name: Any, arrays: Any, operands: Any, **how: Any
) -> Any:
    """What each device runs; gives (out, lse)."""
    options = {"compiler_options": cut.tuned, "return_lse": True} | call.static | how
    engines = mock.patch.object(arguments, "engines_can_send", lambda: True)
    with engines if cut.tuned else contextlib.nullcontext():
        return context_parallel_attention(
            **arrays,
            **operands,
            axis_name=axis_name,
            strategy=cut.strategy,
            layout=cut.layout,
            **options,
        )


def attend_over(
    call: Call, cut: Cut, mesh: Mesh | None = None, check_vma: bool = True, **how: Any
) -> Any:
    """The shard_map'ed function of arrays and operands; gives (out, lse)."""
    arrays, operands, rows = specs_of(call)
    return jax.shard_map(
        functools.partial(attend_as_cut, call, cut, "c", **how),
        mesh=mesh or mesh_of(cut.size),
        in_specs=(arrays, operands),
        out_specs=(rows, rows),
        check_vma=check_vma,
    )


def with_gradients(attend: Any) -> Any:
    """Of arrays, operands, cotangents: out, lse and the gradients of all arrays."""

    def f(arrays: Any, operands: Any, cotangents: Any) -> Results:
        (out, lse), pull = jax.vjp(lambda a: attend(a, operands), arrays)
        (grads,) = pull(cotangents)
        return {"out": out, "lse": lse} | {f"d_{n}": g for n, g in grads.items()}

    return f


def inputs(call: Call) -> tuple[Any, Any, Any]:
    return call.arrays, call.operands, call.cotangents


def jitted(there: Call, cut: Cut, **how: Any) -> Any:
    """Of what `inputs` gives: out, lse and all gradients, as they are laid out."""
    run = with_gradients(attend_over(there, cut, **how))
    mesh = how.get("mesh") or mesh_of(cut.size)
    tuned = compiler_options(mesh) if cut.tuned else {}
    # Of a CPU there are none: `jit` has those of the suite.
    return jax.jit(run, compiler_options=tuned) if tuned else jit(run)


def compute(call: Call, cut: Cut, **how: Any) -> Results:
    """out, lse and all gradients, in the order of the sequence."""
    there = laid_out(call, cut)
    return put_back(jitted(there, cut, **how)(*inputs(there)), call, cut)


# ---- the truth -----------------------------------------------------------------------


def expected(call: Call) -> Results:
    """The truth; of packed documents one by one."""
    if not is_packed(call):
        return truth(call)
    arrays, (cu_q, cu_kv) = call.arrays, boundaries(call)
    want: Results = {f"d_{n}": np.zeros(a.shape) for n, a in arrays.items()}
    want["out"] = np.zeros((*arrays["q"].shape[:2], arrays["v"].shape[2]))
    want["lse"] = np.full(arrays["q"].shape[:2], -np.inf)
    for i in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[i : i + 2]), slice(*cu_kv[i : i + 2])
        lens = {n: x[i : i + 1] for n, x in call.operands.items() if n != "cu_seqlens"}
        own = {
            n: a[rows][None] if n == "q" else a[keys][None] if n in "kv" else a
            for n, a in arrays.items()
        }
        cotangents = tuple(a[rows][None] for a in call.cotangents)
        found = truth(Call(own, lens, call.static, cotangents))
        for name, at in (("out", rows), ("lse", rows), ("d_q", rows)):
            want[name][at] = found[name][0]
        for name in ("d_k", "d_v"):
            want[name][keys] = found[name][0]
        if "sinks" in arrays:
            want["d_sinks"] += found["d_sinks"]
    return want


def assert_right(call: Call, got: Results, want: Results | None = None) -> None:
    """Everything is the truth, lse in float32; dtypes are those of the arrays."""
    want, dtype = want or expected(call), call.arrays["q"].dtype
    assert set(got) == set(want)
    assert got["out"].dtype == dtype and got["lse"].dtype == F32
    for name, x in got.items():
        if name.startswith("d_"):
            assert x.dtype == call.arrays[name[2:]].dtype
        try:
            assert_close(x, want[name], F32 if name == "lse" else dtype)
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}\n{call}") from None


# ---- calls ---------------------------------------------------------------------------


def segments(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Ids in runs, in any order: a segment may go on after another one."""
    runs = rng.integers(-1, 3, (batch, length // 3 + 1)).astype(np.int32)
    return np.repeat(runs, 3, axis=1)[:, :length]


def everything(rng: np.random.Generator, dtype: Any = F32, **changes: Any) -> Call:
    """A call with every option that batches take."""
    sizes = {"batch": 2, "q_len": 32, "kv_len": 32, "heads": 4, "kv_heads": 2, "dim": 8}
    options = {
        "causal": True,
        "window": (13, None),
        "softcap": 2.0,
        "sinks": cast(rng.standard_normal(4), F32),
        "q_lens": np.int32([27, 32]),
        "kv_lens": np.int32([32, 14]),
        "segment_ids": segments(rng, 2, 32),
    }
    return draw(rng, dtype, **(sizes | options | changes))


def simple(rng: np.random.Generator, dtype: Any = F32, **changes: Any) -> Call:
    """A causal call with sinks."""
    rest = {"window": None, "softcap": None, "segment_ids": None}
    rest |= {"q_lens": None, "kv_lens": None}
    return everything(rng, dtype, **(rest | changes))


def documents(rng: np.random.Generator, dtype: Any = F32, **changes: Any) -> Call:
    """Packed documents, with every option that they take."""
    sizes = {"q_len": 64, "kv_len": 64, "heads": 4, "kv_heads": 2, "dim": 8}
    options = {
        "causal": True,
        "cu_seqlens": np.int32([8, 16, 56]),
        "q_lens": np.int32([8, 30]),
        "kv_lens": np.int32([5, 39]),
        "sinks": cast(rng.standard_normal(4), F32),
    }
    return draw(rng, dtype, packed=True, **(sizes | options | changes))


by_cut = pytest.mark.parametrize("cut", CUTS, ids=str)
by_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
by_kind = pytest.mark.parametrize("kind", [everything, documents])


# ---- tables in which any two options meet --------------------------------------------

HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}


def covering(factors: dict[str, Any], fits: Any = lambda row: True) -> list[Any]:
    """Rows of values in which any two of different factors meet, where they fit."""
    rng, names = np.random.default_rng(0), list(factors)

    def pairs(row: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(row.items(), 2))

    missing = {
        pair
        for a, b in itertools.combinations(names, 2)
        for pair in itertools.product(
            ((a, x) for x in factors[a]), ((b, y) for y in factors[b])
        )
        if fits(dict(pair))
    }
    rows = []
    while missing:
        seeds = sorted(missing, key=str)
        drawn = []
        for _ in range(40):
            row = {n: factors[n][rng.integers(len(factors[n]))] for n in names}
            row |= dict(seeds[rng.integers(len(seeds))])
            if fits(row):
                drawn.append(row)
        if drawn:
            rows.append(max(drawn, key=lambda row: len(pairs(row) & missing)))
            missing -= pairs(rows[-1])
    return rows


def one_of_each(cuts: tuple[Cut, ...], rows: list[Any], shows: Any) -> list[Any]:
    """A row of each cut, which show most together of each strategy and layout.

    shows: what a row shows, a set.
    """
    seen: set[Any] = set()
    found = []
    for cut in cuts:
        of_cut = [
            (set(itertools.product((cut.strategy, cut.layout), shows(row))), row)
            for row in rows
            if row["cut"] == cut
        ]
        shown, row = max(of_cut, key=lambda each: len(each[0].difference(seen)))
        found.append(row)
        seen |= shown
    return found


def table(rows: list[Any], often: Sequence[Any] = ()) -> pytest.MarkDecorator:
    """A case for each row; CI takes those of `often` each time."""
    shown = lambda row: "-".join(str(x) for x in row.values() if str(x))  # noqa: E731
    cases = [
        pytest.param(row, marks=pytest.mark.often if row in often else ())
        for row in rows
    ]
    return pytest.mark.parametrize("row", cases, ids=shown)
