"""What joined calls tell the CUDA launchers, in programs that are lowered for a GPU."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_attention_launch import B, D, E, K, N, S, T, array, ints, launches

from jax_kvblock.attention import primitive
from jax_kvblock.attention.config import AttentionConfig, Operands
from jax_kvblock.attention.ops import LogSumExp

F32 = jnp.float32
DQ, OUT, ROWS = (
    f"{B}x{T}x{N}x{D}xbf16",
    f"{B}x{T}x{N}x{E}xbf16",
    f"{B}x{N}x{T}xf32",
)
COUNTER = "16xui8"  # where tiles are uneven


@dataclasses.dataclass(frozen=True)
class Launch:
    """A call of a handler; aliases: of operands, by the numbers of results."""

    name: str
    told: dict[str, float]
    operands: list[str]
    results: list[str]
    aliases: dict[int, int]


def launches_of(f: Any, *args: Any) -> list[Launch]:
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    of = re.compile(r"tensor<([^>]*)>").findall
    alias = re.compile(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)")
    for line in text.splitlines():
        name = re.search(r"custom_call @kvblock_attention_(\w+)\(", line)
        if name is None:
            continue
        attributes = re.search(r"backend_config = \{(.*?)\}", line)
        assert attributes is not None
        told = re.findall(r"(\w+) = (\S+) :", attributes[1])
        given, made = line[line.rindex(" : (") :].split(" -> ")
        aliases = {int(result or 0): int(i) for result, i in alias.findall(line)}
        found.append(
            Launch(
                name[1], {n: float(x) for n, x in told}, of(given), of(made), aliases
            )
        )
    return found


def operands(**options: Any) -> Operands:
    return Operands(array(B, T, N, D), array(B, S, K, D), array(B, S, K, E), **options)


def config_of(**how: Any) -> AttentionConfig:
    return AttentionConfig(**{"scale": 0.125, "implementation": "cuda_sm90"} | how)


def forward(x: Operands, **how: Any) -> list[Launch]:
    f = functools.partial(primitive.joined, config_of(**how))
    return launches_of(f, x, array(B, T, N, E), array(B, N, T, dtype=F32))


def backward(x: Operands, **how: Any) -> list[Launch]:
    def f(x: Any, lse: Any, delta: Any, d_o: Any, dq: Any) -> Any:
        return primitive.backward(config_of(**how), x, LogSumExp(lse), delta, d_o, dq)

    rows = array(B, N, T, dtype=F32)
    return launches_of(f, x, rows, rows, array(B, T, N, E), array(B, T, N, D))


LENGTHS = {"q_lens": ints(B), "kv_lens": ints(B)}


def test_a_joined_forward_gets_o_and_lse_and_writes_over_them():
    (plain,), (uneven,) = forward(operands()), forward(operands(**LENGTHS))
    assert plain.name == "forward" and plain.told["joins"] == 1
    assert plain.operands[3:] == [OUT, ROWS] and plain.results == [OUT, ROWS]
    assert plain.aliases == {0: 3, 1: 4}
    assert uneven.operands[3:] == ["2xi32", "2xi32", OUT, ROWS]
    assert uneven.results == [OUT, ROWS, COUNTER]
    assert uneven.aliases == {0: 5, 1: 6}


def test_a_joined_forward_of_packed_rows():
    x = Operands(array(T, N, D), array(S, K, D), array(S, K, E), cu_q=ints(4),
                 cu_kv=ints(4))  # fmt: skip
    f = functools.partial(primitive.joined, config_of(packed=True))
    (found,) = launches_of(f, x, array(T, N, E), array(N, T, dtype=F32))
    own = [f"{T}x{N}x{E}xbf16", f"{N}x{T}xf32"]
    assert found.operands[-2:] == own and found.results == [*own, COUNTER]
    assert found.aliases == {0: 5, 1: 6} and found.told["joins"] == 1


def test_beside_nccl_tiles_are_handed_out_in_a_joined_call_too():
    (found,) = forward(operands(), shares_gpu=True)
    assert found.operands[3:] == ["2xi32", OUT, ROWS] and found.told["joins"] == 1


TILES = {"tile_indices": ints(1, 1, 1, 2), "tile_counts": ints(1, 1, 1)}
UNJOINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "generic kernels": ({}, {"implementation": "cuda"}),
    "softcap": ({}, {"softcap": 5.0}),
    "a negative scale": ({}, {"scale": -0.5}),
    "no scale": ({}, {"scale": 0.0}),
    "sinks": ({"sinks": array(1, N, dtype=F32)}, {}),
    "bias": ({"bias": array(1, 1, T, S)}, {}),
    "tiles": (TILES, {"block_q": 128, "block_kv": 256}),
}


@pytest.mark.parametrize(("options", "how"), UNJOINED.values(), ids=UNJOINED)
def test_where_no_kernel_joins_the_call_is_a_plain_one(options, how):
    (found,) = forward(operands(**options), **how)
    assert found.name == "forward" and found.told["joins"] == 0
    assert found.aliases == {} and found.operands[-2:] != [OUT, ROWS]
    assert found.results[:2] == [OUT, ROWS]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backward_call_gets_dq_and_writes_over_it(deterministic):
    (found,) = backward(operands(), deterministic=deterministic)
    assert found.name == "backward_kv" and found.told["joins"] == 1
    assert found.told["deterministic"] == deterministic
    assert found.operands[3:] == [ROWS, ROWS, OUT, DQ]
    keys = [f"{B}x{S}x{K}x{D}xbf16", f"{B}x{S}x{K}x{E}xbf16"]
    assert found.results[:3] == [*keys, DQ] and found.results[3].endswith("xui8")
    assert found.aliases == {2: 6}


def test_where_no_kernel_adds_the_calls_are_plain_ones():
    """Generic kernels add in float32, which is no result; or dq has its own kernel."""
    (found,) = backward(operands(), implementation="cuda")
    assert found.told["joins"] == 0 and found.aliases == {}
    assert found.operands[3:] == [ROWS, ROWS, OUT]
    segments = {"q_segments": ints(B, T), "kv_segments": ints(B, S)}
    pair = backward(operands(**segments), deterministic=True)
    assert {x.name for x in pair} == {"backward_kv", "backward_q"}
    assert all(x.told["joins"] == 0 and x.aliases == {} for x in pair)
    (found,) = backward(operands(**segments))
    assert found.told["joins"] == 1 and found.aliases == {2: 10}


def test_other_calls_say_that_they_join_nothing():
    for kernels in ("cuda", "cuda_sm90"):
        told = launches({}, gradients=True, implementation=kernels, deterministic=True)
        assert all(attributes["joins"] == 0 for attributes, *_ in told.values())
        rows, x = array(B, N, T, dtype=F32), operands(bias=array(1, 1, T, S))
        f = functools.partial(
            primitive.backward_bias, config_of(implementation=kernels)
        )
        (found,) = launches_of(f, x, LogSumExp(rows, rows), rows, array(B, T, N, E))
        assert found.name == "backward_bias" and found.told["joins"] == 0
