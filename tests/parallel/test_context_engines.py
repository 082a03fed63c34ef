"""Programs whose devices send by copy engines, and kernels beside NCCL's."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_calls import Cut, mesh_of
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from test_context_programs import (
    BACKWARD,
    FORWARD,
    JOINED,
    by_kind,
    by_layout,
    calls_of,
    is_gradient,
    packed,
    plain,
    sent,
    steps_of,
    waits_for,
)

from jax_kvblock.attention import cuda, primitive
from jax_kvblock.attention.config import AttentionConfig, Operands
from jax_kvblock.parallel import arguments, context_parallel_attention

pytestmark = pytest.mark.usefixtures("four_cpus")

# ---- what engines send ---------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
@by_layout
@by_kind
def test_engines_send_to_all_others(rng, kind, layout, size):
    """Once there and, in the dtype that a kernel gives them in, gradients once back."""
    changes = {"cu_seqlens": np.int32([0, 24, 48])} if kind is packed else {}
    call = kind(rng, q_len=48, kv_len=48, **changes)
    cut = Cut("all_gather", layout, size, tuned=True)
    once = Counter({("ppermute", "bfloat16", x): size - 1 for x in (8, 24)})
    steps = steps_of(call, cut)
    assert sent(steps) == once
    turns = [{(i, (i + by) % size) for i in range(size)} for by in range(1, size)]
    pairs = [{*step.pairs} for step in steps if step.shape[-1] == 8 and step.pairs]
    assert sorted(pairs, key=sorted) == sorted(turns, key=sorted)
    both = steps_of(call, cut, gradients=True)
    assert sent(both) == once + once + once
    gradients = [step for step in both if is_gradient(both, step) and step.pairs]
    assert sent(gradients) == once


@pytest.mark.parametrize(
    "changes",
    [{"window": (13, None)}, {"causal": False, "window": (4, 4)}, {"kv_len": 32}],
    ids=["a window", "both sides", "other keys than queries"],
)
def test_what_engines_do_not_send(rng, changes):
    """Where own keys and others' are no calls apart, XLA gathers."""
    call = plain(rng, **({"q_len": 64, "kv_len": 64} | changes))
    plain_cut, tuned = Cut("all_gather"), Cut("all_gather", tuned=True)
    assert sent(steps_of(call, tuned)) == sent(steps_of(call, plain_cut))
    assert {name for name, *_ in sent(steps_of(call, tuned))} == {"all_gather"}


@by_kind
def test_keys_that_engines_send_arrive_under_the_work_on_ones_own(rng, kind):
    """None waits for another one; backward, gradients go home under it."""
    cut = Cut("all_gather", tuned=True)
    steps = steps_of(kind(rng), cut, gradients=True)
    sends = calls_of(steps, "ppermute")
    home = [i for i in sends if is_gradient(steps, steps[i])]
    there = [i for i in sends if i not in home]
    forward, backward = (calls_of(steps, x) for x in (FORWARD, BACKWARD))
    assert len(forward) == len(backward) == 2 and len(there) == 2 * len(home) == 12
    assert waits_for(steps, there, [*forward, *backward, *sends]) == [set()] * 12
    assert waits_for(steps, forward, forward + there[:6]) == [
        set(), {0, *range(2, 8)},
    ]  # fmt: skip
    assert waits_for(steps, home, backward + home) == [{0}] * 6
    assert waits_for(steps, backward, backward + home) == [set(), {0}]


# ---- kernels that share a GPU with what travels --------------------------------------


def traced(**how: Any) -> list[bool]:
    """Of each forward call, in order, whether it shares the GPU with NCCL."""
    rows = P(None, "c")

    def local(q: Any, k: Any, v: Any) -> Any:
        return context_parallel_attention(q, k, v, axis_name="c", causal=True, **how)

    over = jax.shard_map(local, mesh=mesh_of(), in_specs=rows, out_specs=rows)
    shapes = [(1, 1024, n, 64) for n in (4, 2, 2)]
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    found: list[bool] = []

    def look(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            call = equation.params.get("call")
            name = equation.primitive.name
            if JOINED.get(name, name) == FORWARD:
                found.append(call.config.shares_gpu)
            for inner in jaxprs_in_params(equation.params):
                look(inner)

    look(jax.make_jaxpr(over)(*arrays).jaxpr)
    return found


def test_own_keys_beside_nccl(monkeypatch):
    """Own keys are the first call, and what is sent meanwhile takes multiprocessors.

    Copy engines take none, where one process has all devices.
    """
    monkeypatch.setattr(arguments, "engines_can_send", lambda: True)
    shared = [True, False, False, False]
    assert traced(strategy="ring") == shared
    assert traced(strategy="ring", compiler_options=True) == [False] * 4
    assert traced(strategy="all_gather", compiler_options=True) == [False, False]
    assert traced(strategy="all_gather") == [True, False]
    assert traced(strategy="ulysses") == [False]
    for can_send, processes in ((False, 1), (True, 2)):
        monkeypatch.setattr(arguments, "engines_can_send", lambda it=can_send: it)
        monkeypatch.setattr(jax, "process_count", lambda it=processes: it)
        assert traced(strategy="ring", compiler_options=True) == shared
        gathered = traced(strategy="all_gather", compiler_options=True)
        assert gathered == [True, False]


@pytest.mark.parametrize("kernels", ["cuda_sm90", "cuda"])
def test_tiles_are_handed_out_beside_nccl(kernels):
    """By lengths, which Hopper's kernel takes for work that is not known beforehand."""
    x = jnp.ones((2, 256, 4, 64), jnp.bfloat16)
    size = cuda.sizes_of(AttentionConfig(1.0), Operands(x, x, x))
    full = cuda._as_uneven(Operands(x, x, x), size).q_lens
    np.testing.assert_array_equal(full, [256, 256])
    lens = jnp.int32([3, 256])
    given = Operands(x, x, x, kv_lens=lens)
    assert cuda._as_uneven(given, size) is given

    def operands(shares: bool) -> int:
        config = AttentionConfig(1.0, implementation=kernels, shares_gpu=shares)
        f = lambda x: primitive.forward(config, Operands(x, x, x))[0]  # noqa: E731
        lowered = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))
        (call,) = re.findall(
            r"custom_call @kvblock_attention_forward\(([^)]*)\)", lowered.as_text()
        )
        return call.count("%")

    assert operands(True) - operands(False) == (kernels == "cuda_sm90")
