"""Attention that skips: lists of tiles beside dense attention, selectors, and peers.

Three kinds of cases, which `--cases` picks by name:

- "tiles": a random eighth of the tiles, a list for each head, beside dense attention of
  the same build, forward and backward. TFLOP/s count the pairs that attend, alone.
- "selectors": a tenth of the tiles by each selector. Times of attention to its lists,
  of the selection alone, and of both in one program; and of a selection's parts:
  scores, which tiles are kept, the lists.
- "peers": the same lists by FlexAttention and by FlashInfer's block-sparse attention,
  both in torch, where they are installed. FlashInfer's plan on the host is timed apart
  ("plan").

Everybody takes turns on a hot chip, as in bench_attention.py, and is held to float64 of
one KV head first. What "peers ... tuned" adds is FlexAttention that tries its tiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import bench_attention
import jax
import jax.numpy as jnp
import numpy as np
from support import attention_peers, attention_truth, common, sparse_peers, tile_truth
from support.common import OURS, Results

from jax_kvblock import AttentionTiles, flash_attention
from jax_kvblock.sparse import (
    AntidiagonalThreshold,
    BlockSparse,
    LearnedGate,
    LocalGlobal,
    PooledThreshold,
    Random,
    ScoredSelector,
    Selector,
    Streaming,
    Strided,
    init_gate,
)
from jax_kvblock.sparse.arguments import grid_of
from jax_kvblock.sparse.scored import chosen
from jax_kvblock.sparse.select import lists_of, map_of

SIDE = 128
SAME = 1e-3  # of the tiles may be others in another program


@dataclasses.dataclass(frozen=True)
class Case:
    """kind: "tiles", "selectors" or "peers". share: one of so many tiles is listed.

    selectors: how they choose: "fixed", "threshold", "pooled" or "learned".
    """

    kind: str
    length: int
    causal: bool
    share: int
    lists: str = "each head"  # whose they are: also "all heads", "each KV head"
    backward: bool = True
    tuned: bool = False
    selectors: str = ""
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        sizes = f"H{self.heads}/{self.kv_heads} S{self.length} D{self.dim}"
        name = f"{self.kind} 1/{self.share} B1 {sizes} {mask}"
        if self.kind == "peers":
            name += f", lists of {self.lists}" + ", tuned" * self.tuned
        return name + f", {self.selectors}" * bool(self.selectors)

    def inputs(self) -> list[jax.Array]:
        """q, k, v and an output gradient, `[1, S, N, D]`."""
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [
            jax.random.normal(key, (1, self.length, n, self.dim), jnp.bfloat16)
            for key, n in zip(keys, heads, strict=True)
        ]

    def flops(self, tiles: AttentionTiles | None) -> float:
        """Forward, of the pairs that attend: of a row's own tile 129 of 256 do."""
        if tiles is None:
            side = self.length
            pairs = self.heads * (side * (side + 1) / 2 if self.causal else side * side)
        else:
            counts = np.asarray(tiles.counts, np.float64)
            listed = counts.sum() * self.heads / counts.shape[1]
            own = counts.size * self.heads / counts.shape[1] if self.causal else 0
            pairs = listed * SIDE**2 - own * SIDE * (SIDE - 1) / 2
        return 4 * self.dim * pairs


CASES = (
    *(
        Case("tiles", length, causal, 8)
        for length in (16384, 65536)
        for causal in (False, True)
    ),
    *(
        Case("selectors", 65536, True, 10, selectors=which)
        for which in ("fixed", "threshold", "pooled", "learned")
    ),
    Case("peers", 16384, False, 8, "all heads"),
    Case("peers", 65536, True, 10, "all heads"),
    Case("peers", 65536, True, 10, "each KV head", backward=False),
    Case("peers", 65536, True, 10, "each KV head", backward=False, tuned=True),
)


def bench(options: argparse.Namespace, results: Results) -> None:
    kinds = {"tiles": _tiles, "selectors": _selectors, "peers": _peers}
    for case in common.wanted(options, CASES):
        if options.quick:
            case = dataclasses.replace(case, length=512, heads=4, kv_heads=2, dim=64)
        try:
            kinds[case.kind](case, results, options.quick)
        except Exception as error:
            results.fail(case.name, "case", error)
        gc.collect()
        results.save()


def _listed(case: Case, q: jax.Array, k: jax.Array) -> AttentionTiles:
    """Random ones, in order, which under a causal mask end with a row's own."""
    selector = Random(
        sparsity_ratio=1 - 1 / case.share, per_head=case.lists != "all heads"
    )
    if case.lists != "each KV head":
        return selector(q, k, causal=case.causal)
    tiles = selector(q[:, :, : case.kv_heads], k, causal=case.causal)
    group = case.heads // case.kv_heads
    indices, counts = (jnp.repeat(x, group, 1) for x in (tiles.indices, tiles.counts))
    return AttentionTiles(indices, counts, tiles.block_q, tiles.block_kv)


def _every_tile(case: Case) -> AttentionTiles:
    rows = case.length // SIDE
    at = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (1, 1, rows, rows))
    counts = jnp.arange(1, rows + 1) if case.causal else jnp.full(rows, rows)
    return AttentionTiles(at, counts.astype(jnp.int32)[None, None])


def _ours(case: Case, tiles: AttentionTiles | None) -> Callable[..., Any]:
    return lambda q, k, v: flash_attention(q, k, v, causal=case.causal, tiles=tiles)


def _verify(calls: dict[str, Any], known: Any, length: int) -> None:
    host = calls.get("numpy", attention_peers.rows)
    if "both" in calls:
        out, grads = calls["both"]()
        made = [host(x) for x in (out, *grads)]
    else:
        made = [host(calls["forward"]())]
    if not all("dq" in found for found in known.values()):
        made = made[:1]
    attention_truth.check(made, known, attention_peers.sample(length))


def _add(case: Case, results: Results, name: str, flops: float, seconds: Any) -> None:
    rows = [("forward", flops, seconds["forward"])]
    if "both" in seconds:
        rows.append(("backward", 2.5 * flops, seconds["both"] - seconds["forward"]))
    for metric, done, value in rows:
        work = f"{case.name} / {metric}"
        results.add(work, name, "time", value * 1e3, "ms")
        results.add(work, name, "rate", done / value / 1e12, "TFLOP/s")


# ---- lists beside dense --------------------------------------------------------------


def _tiles(case: Case, results: Results, quick: bool) -> None:
    inputs = case.inputs()
    tiles = _listed(case, *inputs[:2])
    running, flops = {}, {}
    for name, listed in ((OURS, tiles), (f"{OURS}, dense", None)):
        calls = bench_attention.jax_calls(_ours(case, listed), inputs)
        seen = _every_tile(case) if listed is None else listed
        # Gradients of all pairs would take longer than what is timed.
        grads = listed is not None or case.length <= 16384
        known = tile_truth.truth(seen, case.causal, inputs, case.kv_heads - 1, grads)
        _verify(calls, known, case.length)
        running[name], flops[name] = calls, case.flops(listed)
    for name, seconds in bench_attention.hot_times(running, quick).items():
        _add(case, results, name, flops[name], seconds)


# ---- selectors -----------------------------------------------------------------------


def _of_a_tenth(case: Case) -> dict[str, Selector]:
    ratio = 1 - 1 / case.share
    rows = case.length // SIDE
    # As many tiles as a tenth of the mask's, of a window and the first one.
    listed = [
        np.minimum(np.arange(1, rows + 1), window + 1).sum()
        for window in range(1, rows)
    ]
    wanted = rows * (rows + 1) / 2 / case.share
    window = 1 + int(np.argmin(np.abs(np.array(listed) - wanted)))
    gate = init_gate(case.heads, case.kv_heads, case.dim)
    groups: dict[str, dict[str, Selector]] = {
        "fixed": {
            "random": Random(sparsity_ratio=ratio),
            "block sparse": BlockSparse(sparsity_ratio=ratio),
            "strided": Strided(sparsity_ratio=ratio),
            "local + global": LocalGlobal(sparsity_ratio=ratio),
            "streaming": Streaming(window=window),
        },
        "threshold": {
            "threshold, tau 0.9": AntidiagonalThreshold(tau=0.9, sparsity_ratio=ratio),
            **{
                f"threshold, stride {stride}": AntidiagonalThreshold(
                    tau=None, sparsity_ratio=ratio, stride=stride
                )
                for stride in (8, 16, 32)
            },
        },
        "pooled": {
            f"pooled, pieces of {piece}": PooledThreshold(
                tau=None, sparsity_ratio=ratio, piece=piece
            )
            for piece in (8, 16, 32, 64)
        },
        "learned": {
            "learned, tiles": LearnedGate(gate, sparsity_ratio=ratio),
            **{
                f"learned, pieces of {piece}": LearnedGate(
                    gate, sparsity_ratio=ratio, piece=piece
                )
                for piece in (16, 32)
            },
        },
    }
    return groups[case.selectors]


def _selectors(case: Case, results: Results, quick: bool) -> None:
    q, k, v, d_o = case.inputs()
    running = {"dense": _call(_ours(case, None), q, k, v)}
    parts: list[str] = []
    selectors = _of_a_tenth(case)
    with ThreadPoolExecutor(4) as pool:  # compiling takes longer than timing
        made = {
            name: pool.submit(_of_selector, case, selector, (q, k, v, d_o))
            for name, selector in selectors.items()
        }
    for name, found in made.items():
        try:
            calls, share = found.result()
        except Exception as error:
            results.fail(case.name, f"{OURS}, {name}", error)
            continue
        running |= {f"{name}: {what}": call for what, call in calls.items()}
        parts.append(name)
        work = f"{case.name} / whole"
        results.add(work, f"{OURS}, {name}", "share of tiles", share, "")
    seconds = {
        name: found["forward"]
        for name, found in bench_attention.hot_times(running, quick).items()
    }
    dense = seconds["dense"]
    results.add(f"{case.name} / dense", OURS, "time", dense * 1e3, "ms")
    for name in parts:
        who = f"{OURS}, {name}"
        own = {
            what.removeprefix(f"{name}: "): value
            for what, value in seconds.items()
            if what.startswith(f"{name}: ")
        }
        for what, value in own.items():
            results.add(f"{case.name} / {what}", who, "time", value * 1e3, "ms")
        whole = own["whole"]
        results.add(f"{case.name} / whole", who, "dense over it", dense / whole, "")
        share = own["selection"] / whole
        results.add(f"{case.name} / selection", who, "of the whole", share, "")


def _call(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    compiled = jax.jit(function).lower(*args).compile()
    made = functools.partial(compiled, *args)
    return {"forward": made, "wait": jax.block_until_ready}


def _check_same(a: AttentionTiles, b: AttentionTiles, cols: int) -> None:
    """In two programs XLA may tile products in two ways: then scores differ in their
    last bits, and of two tiles that are that close one or the other is listed."""
    if not jnp.array_equal(a.counts, b.counts):
        raise AssertionError("one program and two list different numbers of tiles")
    differ = jnp.sum(map_of(a, cols) != map_of(b, cols)) / 2 / jnp.sum(a.counts)
    if differ > SAME:
        raise AssertionError(f"one program and two of them differ by {differ:.2%}")


def _of_selector(
    case: Case, selector: Selector, inputs: tuple[jax.Array, ...]
) -> tuple[dict[str, Any], float]:
    """Calls by what they do, and the share of tiles."""
    q, k, v, _ = inputs
    causal = case.causal

    def select(selector: Selector, q: Any, k: Any) -> Any:
        return selector(q, k, causal=causal)

    def attend(q: Any, k: Any, v: Any, tiles: AttentionTiles) -> Any:
        return flash_attention(q, k, v, causal=causal, tiles=tiles)

    def whole(selector: Selector, q: Any, k: Any, v: Any) -> Any:
        tiles = select(selector, q, k)
        return attend(q, k, v, tiles), tiles  # lists are small

    calls = {"selection": _call(select, selector, q, k)}
    tiles = calls["selection"]["forward"]()
    calls["attention"] = _call(attend, q, k, v, tiles)
    calls["whole"] = _call(whole, selector, q, k, v)
    out, its_tiles = calls["whole"]["forward"]()
    _check_same(tiles, its_tiles, case.length // SIDE)
    again = _call(attend, q, k, v, its_tiles)["forward"]()
    if not jnp.array_equal(again, out):  # the same lists, the same bits
        raise AssertionError("attention in a program of its own differs")
    known = tile_truth.truth(its_tiles, causal, inputs, case.kv_heads - 1, False)
    of_rows = attention_peers.rows(out)
    attention_truth.check([of_rows], known, attention_peers.sample(case.length))
    if isinstance(selector, ScoredSelector):
        calls |= _parts(case, selector, q, k)
    rows = case.length // SIDE
    visible = rows * (rows + 1) / 2 if causal else rows * rows
    return calls, float(np.asarray(tiles.counts).mean() * rows / visible)


def _parts(
    case: Case, selector: ScoredSelector, q: jax.Array, k: jax.Array
) -> dict[str, Any]:
    """What a selection is made of, each a program of its own."""
    sizes = (1, case.length, case.length)
    grid = grid_of("bench", sizes, (SIDE, SIDE), causal=case.causal)
    budget = (selector.tau, selector.sparsity_ratio, selector.capacity, selector.sinks)

    def scores(selector: ScoredSelector, q: Any, k: Any) -> Any:
        return selector.mass(q, k, grid, case.dim**-0.5)

    def kept(mass: Any) -> Any:
        return chosen(mass, grid, *budget).kept

    def lists(kept: Any) -> Any:
        return lists_of(kept, selector.width(grid))

    calls = {"scores": _call(scores, selector, q, k)}
    mass = calls["scores"]["forward"]()
    calls["kept"] = _call(kept, mass)
    calls["lists"] = _call(lists, calls["kept"]["forward"]())
    return calls


# ---- peers ---------------------------------------------------------------------------


def _peers(case: Case, results: Results, quick: bool) -> None:
    inputs = case.inputs()
    tiles = _listed(case, *inputs[:2])
    known = tile_truth.truth(tiles, case.causal, inputs, case.kv_heads - 1)
    missing = {"torch", "flashinfer"} - set(found := sparse_peers.versions())
    results.versions |= found
    for name in sorted(missing):
        print(f"{case.name:42} {name:25} is not installed")
    flops, plans = case.flops(tiles), dict[str, float]()
    calls = bench_attention.jax_calls(_ours(case, tiles), inputs)
    _verify(calls, known, case.length)
    running = {OURS: calls}
    if "torch" in found:
        if "flashinfer" in found:
            sparse_peers.prepare_flashinfer(case.dim, case.causal)
        made = sparse_peers.peers(
            tiles, case.causal, inputs, case.backward, case.tuned, plans
        )
        for name, make in made:
            if name.partition(",")[0] in missing:
                continue
            try:
                calls = make()
                _verify(calls, known, case.length)
                running[name] = calls
            except Exception as error:
                results.fail(case.name, name, error)
    if not case.backward:
        for calls in running.values():
            calls.pop("both", None)
    for name, seconds in bench_attention.hot_times(running, quick).items():
        _add(case, results, name, flops, seconds)
    for name, taken in plans.items():
        results.add(f"{case.name} / forward", name, "plan", taken * 1e3, "ms")


if __name__ == "__main__":
    common.main("sparse", bench, __doc__)
