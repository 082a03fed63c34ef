"""Attention, forward and backward, beside cuDNN, FlashAttention-3 and FlashAttention-2.

TFLOP/s as papers count: 4 B N S² D forward, half of it when causal, 2.5 times as much
backward. Inputs and output gradients are random. The backward pass is timed as forward
and backward together minus forward, for everybody alike.

Such work takes the chip to its power limit within 0.1 s, and the clock goes down. So
everything is timed hot: implementations take turns, in an order drawn anew each time;
in a turn one is called back to back in rounds of 40 ms, of which the first ones do not
count. The median of the others is the result.

Who else is timed, and by which package: attention_peers.py.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import attention_peers, attention_truth, common
from support.common import OURS, Results, cases
from support.rounds import Turns, median_seconds

from jax_kvblock import AttentionTiles, flash_attention
from jax_kvblock.attention import derivatives, flash
from jax_kvblock.attention.ops import LogSumExp
from jax_kvblock.hardware import served

TURNS = Turns(turns=2, rounds=3, seconds=0.04, warm_up=2, least=3)


def bench(options: argparse.Namespace, results: Results) -> None:
    for case in common.wanted(options, cases.ATTENTION_SPEED):
        if options.quick:
            case = _small(case)
        _speed(case, results, options.quick)
        gc.collect()
        results.save()
    case = _small(cases.ATTENTION_MAIN) if options.quick else cases.ATTENTION_MAIN
    if common.wanted(options, [cases.ATTENTION_MAIN]):
        _options(case, results, options.quick)
        _memory(case, results)
        _tiles(case, results, options.quick)
        _masks(case, results, options.quick)


def _small(case: Any) -> Any:
    lengths = (100, 28, 128) if case.lengths else ()
    return cases.dataclasses.replace(
        case,
        length=min(case.length, 256),
        batch=1,
        num_heads=2,
        num_kv_heads=1,
        lengths=lengths,
    )


# ---- implementations -----------------------------------------------------------------


def _inputs(case: Any) -> list[jax.Array]:
    """q, k, v and an output gradient, `[B, S, N, D]`."""
    keys = jax.random.split(jax.random.key(0), 4)
    n, k, d = case.num_heads, case.num_kv_heads, case.head_dim
    e = case.value_dim or d
    return [
        jax.random.normal(key, (case.batch, case.length, *shape), case.dtype)
        for key, shape in zip(keys, ((n, d), (k, d), (k, e), (n, e)), strict=True)
    ]


def _option(case: Any) -> dict[str, Any]:
    """An option of ATTENTION_OPTIONS, as arguments; it masks nothing."""
    rows = case.batch, case.length
    return {
        "": lambda: {},
        "window": lambda: {"window": (case.length, 0)},
        "segments": lambda: {"segment_ids": jnp.zeros(rows, jnp.int32)},
        "sinks": lambda: {"sinks": jnp.zeros(case.num_heads)},
        "offsets": lambda: {
            "q_offset": jnp.full(case.batch, 7),
            "kv_offset": jnp.full(case.batch, 7),
        },
        "softcap": lambda: {"softcap": 50.0},
        "deterministic": lambda: {"deterministic": True},
    }[case.option]()


def _ours(case: Any, implementation: str | None) -> Callable[..., Any]:
    window = None if case.window is None else (case.window, 0)
    options = {"causal": case.causal, "window": window, **_option(case)}
    if not case.packed:
        return lambda q, k, v: flash_attention(
            q, k, v, **options, implementation=implementation
        )
    total = case.batch * case.length
    lengths = case.lengths or (case.length,) * case.batch
    cu = jnp.cumsum(jnp.array([0, *lengths], jnp.int32), dtype=jnp.int32)

    def packed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        flat = [x.reshape(total, *x.shape[2:]) for x in (q, k, v)]
        o = flash_attention(
            *flat, **options, cu_seqlens=(cu, cu), implementation=implementation
        )
        return o.reshape(*q.shape[:-1], v.shape[-1])

    return packed


def jax_calls(
    function: Callable[..., Any], inputs: list[Any], forward_only: bool = False
) -> dict[str, Any]:
    """Compiled forward, and forward with backward, as calls that do not wait.

    forward_only: it may have no backward pass.
    """
    q, k, v, d_o = inputs

    def both(q: Any, k: Any, v: Any, d_o: Any) -> Any:
        out, vjp = jax.vjp(function, q, k, v)
        return out, vjp(d_o)

    forward = jax.jit(function).lower(q, k, v).compile()
    calls = {"forward": lambda: forward(q, k, v), "wait": jax.block_until_ready}
    try:
        backward = jax.jit(both).lower(q, k, v, d_o).compile()
    except NotImplementedError:
        if not forward_only:
            raise
        return calls
    return {**calls, "both": lambda: backward(q, k, v, d_o)}


# ---- timing --------------------------------------------------------------------------


def hot_times(running: dict[str, dict[str, Any]], quick: bool) -> dict[str, dict]:
    """Median seconds of every implementation's forward and both, on a hot chip."""
    calls = {
        (name, what): made[what]
        for name, made in running.items()
        for what in ("forward", "both")
        if what in made
    }

    def wait(key: tuple[str, str], made: Any) -> None:
        running[key[0]]["wait"](made)

    found: dict[str, dict] = {name: {} for name in running}
    for (name, what), seconds in median_seconds(calls, quick, TURNS, wait).items():
        found[name][what] = seconds
    return found


def _speed(case: Any, results: Results, quick: bool) -> None:
    inputs = _inputs(case)
    known = attention_truth.truth(case, inputs)
    running: dict[str, dict[str, Any]] = {}

    functions = [(OURS, _ours(case, None))]
    if choose_kernels() == "cuda_sm90" and case in cases.ATTENTION_GENERIC:
        # The kernels for sm_80 and newer.
        functions.append((f"{OURS}, cuda", _ours(case, "cuda")))
    peers = dict(attention_peers.in_jax(case))
    made: dict[str, Callable[[], dict[str, Any]]] = {}
    with ThreadPoolExecutor() as pool:  # compiling takes longer than timing
        for name, function in (*functions, *peers.items()):
            made[name] = pool.submit(jax_calls, function, inputs, name in peers).result
    made |= attention_peers.in_torch(case, inputs)
    for name, make in made.items():
        try:
            calls = make()
            _verify(case, calls, known)
            running[name] = calls
        except Exception as error:
            results.fail(case.name, name, error)
    for name, seconds in hot_times(running, quick).items():
        _add(case, results, name, seconds)


def choose_kernels() -> str:
    """Whose kernels None takes for 16 bits here: "cuda_sm90", "cuda" or "xla"."""
    named = {row.op: row.implementation for row in served.capabilities()}
    return named[served.ATTENTION_16_BITS].split()[0]


def _add(case: Any, results: Results, name: str, seconds: dict[str, float]) -> None:
    rows = [("forward", case.flops, seconds["forward"])]
    if "both" in seconds:
        backward = seconds["both"] - seconds["forward"]
        rows.append(("backward", 2.5 * case.flops, backward))
    for metric, flops, value in rows:
        work = f"{case.name} / {metric}"
        results.add(work, name, "time", value * 1e3, "ms")
        results.add(work, name, "rate", flops / value / 1e12, "TFLOP/s")


def _options(case: Any, results: Results, quick: bool) -> None:
    """What options cost where they mask nothing."""
    inputs = _inputs(case)
    options = {
        option: cases.dataclasses.replace(case, option=option)
        for option in ("", *cases.ATTENTION_OPTIONS)
    }
    running = {
        option: jax_calls(_ours(one, None), inputs) for option, one in options.items()
    }
    for option, seconds in hot_times(running, quick).items():
        # Beside the same call without an option, in the same rounds.
        name = cases.dataclasses.replace(case, option=option or "no option")
        _add(name, results, OURS, seconds)


def _verify(case: Any, calls: dict[str, Any], known: Any) -> None:
    """Values and gradients are those of float64, for everybody alike."""
    host = calls.get("numpy", attention_peers.rows)
    if "both" in calls:
        out, grads = calls["both"]()
        results = [host(x) for x in (out, *grads)]
    else:
        results = [host(calls["forward"]())]
    attention_truth.check(results, known, attention_peers.sample(case.length))


# ---- memory, tiles -------------------------------------------------------------------


def _memory(case: Any, results: Results) -> None:
    """Temporaries of the compiled passes, backward also over what they may be: 4
    bytes a query element, twice lse and 1 MiB.
    """
    q, k, v, d_o = _inputs(case)
    function = _ours(case, None)
    forward = jax.jit(function).lower(q, k, v).compile()
    temp = forward.memory_analysis().temp_size_in_bytes
    results.add(f"{case.name} / forward", OURS, "temporaries", temp, "B")

    def backward(o: Any, lse: Any, d_o: Any, d_lse: Any) -> Any:
        return derivatives.gradients(config, x, o, LogSumExp(lse), d_o, d_lse)

    config, x = flash.arguments.normalize("bench", q, k, v, causal=case.causal)
    o, lse = flash.attention(config, x)
    compiled = jax.jit(backward).lower(o, lse, d_o, lse).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes
    results.add(f"{case.name} / backward", OURS, "temporaries", temp, "B")
    limit = 4 * q.size + 2 * _lse_bytes(case) + (1 << 20)
    over = temp / limit
    results.add(f"{case.name} / backward", OURS, "temporaries over limit", over, "")


def _lse_bytes(case: Any) -> int:
    return 4 * case.batch * case.num_heads * case.length


def _tiles(case: Any, results: Results, quick: bool) -> None:
    """Time against the number of listed tiles: a random share of all."""
    inputs = _inputs(case)
    rows = -(-case.length // 128)
    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(rows) for _ in range(rows)])
    indices = jnp.asarray(order[None, None], jnp.int32)
    running = {}
    for share in (1, 2, 4, 8, 16):
        counts = jnp.full((1, 1, rows), max(1, rows // share), jnp.int32)
        tiles = AttentionTiles(indices, counts)
        running[f"1/{share}"] = jax_calls(
            lambda q, k, v, tiles=tiles: flash_attention(q, k, v, tiles=tiles), inputs
        )
    for share, seconds in hot_times(running, quick).items():
        name = f"{OURS}, {share} of the tiles"
        case_name = f"{case.name.replace('causal', 'tiles')} / forward"
        results.add(case_name, name, "time", seconds["forward"] * 1e3, "ms")
        backward = seconds["both"] - seconds["forward"]
        case_name = f"{case.name.replace('causal', 'tiles')} / backward"
        results.add(case_name, name, "time", backward * 1e3, "ms")


def _masks(case: Any, results: Results, quick: bool) -> None:
    """Eight documents, causal, as segments and as a mask of tiles with bits."""
    inputs = _inputs(case)
    ends = np.sort(np.random.default_rng(0).integers(0, case.length, 7))
    document = np.searchsorted(ends, np.arange(case.length), side="right")
    ids = jnp.broadcast_to(jnp.asarray(document, jnp.int32), (case.batch, case.length))
    tiles = AttentionTiles.from_mask(
        lambda b, h, i, j: (i >= j) & (document[i] == document[j]),
        q_len=case.length,
        kv_len=case.length,
    )
    by_name = {
        f"{OURS}, segments": {"causal": True, "segment_ids": ids},
        f"{OURS}, mask": {"tiles": tiles},
    }
    running = {
        name: jax_calls(
            lambda q, k, v, how=how: flash_attention(q, k, v, **how), inputs
        )
        for name, how in by_name.items()
    }
    out = {name: np.asarray(calls["forward"]()) for name, calls in running.items()}
    apart = np.abs(np.subtract(*(x.astype(np.float32) for x in out.values()))).max()
    assert apart < 0.05, f"the mask is not the segments: {apart}"
    for name, seconds in hot_times(running, quick).items():
        for what, value in (
            ("forward", seconds["forward"]),
            ("backward", seconds["both"] - seconds["forward"]),
        ):
            work = f"{case.name.replace('causal', 'documents')} / {what}"
            results.add(work, name, "time", value * 1e3, "ms")


if __name__ == "__main__":
    common.main("attention", bench, __doc__)
