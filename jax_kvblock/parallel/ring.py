"""Keys and values that come by, device by device (the ring of Liu et al., 2023).

Every device keeps its queries. What its rows saw of each shard is merged by its
log-sum-exp, in the calls themselves where shards are few. The backward pass runs the
same way: with lse and delta known, each shard's part of the gradients is a call of its
own. Gradients of keys and values travel with them, in float32, and end at home.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jax_kvblock.parallel.local import Arrays, Here
from jax_kvblock.parallel.order import after
from jax_kvblock.parallel.pieces import Call
from jax_kvblock.parallel.sums import Gradients, Merged


def forward(here: Here, q: Any, k: Any, v: Any) -> Merged:
    """What rows see of every shard."""
    counts = here.visible()
    merged = Merged(q, v, sum(counts.values()))
    done: list[Any] = []
    for step, (k_now, v_now), ids in _walk(here, (k, v), [*counts], done, ()):
        calls = here.calls(here.keys(step), step, ids) if step else here.own_calls()
        for call in calls:
            merged.attend(call, k_now, v_now)
        done.append(merged.so_far())
    return merged


def backward(here: Here, x: Arrays, lse: Any, delta: Any, d_o: Any) -> Arrays:
    """dq, dk, dv.

    A device's own keys come last: the gradients of others' go home under them. The
    first shard waits for nothing of the backward pass, and may come before it begins.
    Gradients travel as a kernel gives them until two parts are added, in float32.
    """
    _, *own = x
    counts = here.visible()
    sums = Gradients(x, sum(counts.values()))

    def run(calls: Sequence[Call], keys: Arrays, delta: Any) -> list[Arrays]:
        return [sums.run(call, keys, lse, delta, d_o) for call in calls]

    done: list[Any] = []
    travelling: Any = None
    before = 0
    steps = [s for s in counts if s]
    for step, keys, ids in _walk(here, (own[0], own[1]), steps, done, delta):
        arrived: Arrays = ()
        if travelling is not None:
            arrived = _parts(here.send(travelling, step - before))
        found = run(here.calls(here.keys(step), step, ids), keys, delta)
        done.append(sums.so_far())
        # Both are ready at once, so that one collective can send them. They do not wait
        # for dq: the next call writes over it, and does not wait for them.
        travelling = after(_joined(here, sums.of_keys(found, keys, arrived)), ())
        before = step
    keys = (own[0], own[1])
    if travelling is None:
        return sums.result(sums.of_keys(run(here.own_calls(), keys, delta), keys))
    home = _parts(here.send(travelling, -before % here.plan.size))
    found = run(here.own_calls(), keys, after(delta, done[-1]))
    return sums.result(sums.of_keys(found, keys, home))


def _walk(
    here: Here, own: Arrays, steps: Sequence[int], done: Sequence[Any], since: Any
) -> Iterator[tuple[int, Arrays, Any]]:
    """Every step with the keys and values, and their ids, that are here then.

    The next shard is asked for before this step's work, so that it arrives under it,
    and after that of the step before, the last of `done`: one shard is in use, one on
    its way. The second one comes after `since`. So what the next call writes over has
    been read before: that call needs what comes after it.
    """
    ids = here.mask.kv_segments
    held: Any = (_joined(here, own), ids) if any(steps) else (own, ids)
    if steps and steps[0]:
        held = here.send(held, steps[0])
    for i, step in enumerate(steps):
        last = step == steps[-1]
        if not last and (i or step):
            held = after(held, done[-1] if i else since)
        coming = None if last else here.send(held, steps[i + 1] - step)
        yield step, _parts(held[0]) if step else own, held[1]
        held = coming


def _joined(here: Here, pair: Arrays) -> Any:
    """Two arrays as one where they are alike; what kernels read of it is not copied."""
    a, b = pair
    alike = (a.shape, a.dtype) == (b.shape, b.dtype)
    return jnp.stack(pair) if here.plan.as_one and alike else pair


def _parts(joined: Any) -> Arrays:
    return joined if isinstance(joined, tuple) else (joined[0], joined[1])
