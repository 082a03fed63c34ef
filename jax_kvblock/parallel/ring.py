"""Keys and values that come by, device by device (the ring of Liu et al., 2023).

Every device keeps its queries. What its rows saw of each shard is merged by its
log-sum-exp. The backward pass runs the same way: with lse and delta known, each shard's
part of the gradients is a call of its own. Gradients of keys and values travel with
them, in float32, and end at home.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax_kvblock.parallel.local import Arrays, Here, after, backward_call, forward_call
from jax_kvblock.parallel.pieces import Call
from jax_kvblock.parallel.sums import Gradients, Merged


def forward(here: Here, q: Any, k: Any, v: Any, merged: Merged) -> None:
    """Adds what rows see of every shard."""
    ids = here.mask.kv_segments
    done: list[Any] = []
    for step, shard in _walk(here, (k, v, ids), here.visible(), done):
        k_now, v_now, ids_now = shard
        for call in here.calls(here.keys(step), step, ids_now):
            merged.add(*forward_call(call, q, k_now, v_now))
        done.append(merged.so_far())


def backward(here: Here, x: Arrays, lse: Any, delta: Any, d_o: Any) -> Arrays:
    """dq, dk, dv.

    A device's own keys come last: the gradients of others' go home under them. The
    first shard waits for nothing of the backward pass, and may come before it begins.
    """
    q, *own = x
    sums = Gradients(x)

    def run(calls: Sequence[Call], k: Any, v: Any) -> Arrays:
        found = [backward_call(c, (q, k, v), lse, delta, d_o) for c in calls]
        return sums.add(found, (k, v))

    held = (*own, here.mask.kv_segments)
    done: list[Arrays] = []
    travelling: Any = None
    before = 0
    for step, (k, v, ids) in _walk(here, held, [s for s in here.visible() if s], done):
        if travelling is not None:
            travelling = here.send(travelling, step - before)
        made = run(here.calls(here.keys(step), step, ids), k, v)
        done.append(made)
        travelling = made if travelling is None else _add(travelling, made)
        before = step
    if travelling is None:
        return sums.result(run(here.own_calls(), *own))
    travelling = here.send(travelling, -before % here.plan.size)
    d_own = run(here.own_calls(), *after(tuple(own), done[-1]))
    return sums.result(_add(d_own, travelling))


def _add(a: Arrays, b: Arrays) -> Arrays:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _walk(
    here: Here, held: Any, steps: Sequence[int], done: Sequence[Any]
) -> Iterator[tuple[int, Any]]:
    """Every step with the shard that is here then.

    The next shard is asked for before this step's work, so that it arrives under it,
    and after that of the step before, the last of `done`: one shard is in use, one on
    its way.
    """
    if steps and steps[0]:
        held = here.send(held, steps[0])
    for i, step in enumerate(steps):
        if i:
            held = after(held, done[-1])
        coming = None
        if step != steps[-1]:
            coming = here.send(held, steps[i + 1] - step)
        yield step, held
        held = coming
