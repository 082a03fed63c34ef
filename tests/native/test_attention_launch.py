"""What a call tells the CUDA launchers, in programs that are lowered for a GPU."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvblock import AttentionTiles, flash_attention
from jax_kvblock.attention import cuda

B, T, S, N, K, D, E = 2, 70, 130, 4, 2, 64, 32
HALF = jnp.bfloat16
Launch = tuple[dict[str, Any], list[str], list[str]]  # attributes, operands, results


def array(*shape: int, dtype: Any = HALF) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return array(*shape, dtype=jnp.int32)


def launches(
    operands: dict[str, Any],
    gradients: bool = False,
    implementation: str = "cuda_sm90",
    q_len: int = T,
    **static: Any,
) -> dict[str, Launch]:
    """By name: what a call is, lowered for CUDA."""
    packed = "cu_seqlens" in operands
    lead = (lambda n: (n,)) if packed else (lambda n: (B, n))
    arrays = {
        "q": array(*lead(q_len), N, D),
        "k": array(*lead(S), K, D),
        "v": array(*lead(S), K, E),
    }
    call = functools.partial(flash_attention, implementation=implementation, **static)

    def values(arrays: Any, operands: Any) -> Any:
        return call(**arrays, **operands)

    def slopes(arrays: Any, operands: Any) -> Any:
        out, pull = jax.vjp(lambda arrays: values(arrays, operands), arrays)
        return pull(out)

    function = jax.jit(slopes if gradients else values)
    text = function.trace(arrays, operands).lower(lowering_platforms=("cuda",))
    found: dict[str, Launch] = {}
    pattern = (
        r"custom_call @kvblock_attention_(\w+)\(.*?backend_config = \{(.*?)\}.* : "
        r"\((.*)\) -> (.*)"
    )
    for name, attributes, given, made in re.findall(pattern, text.as_text()):
        told = re.findall(r"(\w+) = (\S+) :", attributes)
        of = re.compile(r"tensor<([^>]*)>").findall
        found[name] = {n: float(x) for n, x in told}, of(given), of(made)
    return found


def test_the_options_of_a_call_are_told():
    static = {"window": (5, 2), "scale": 0.5, "softcap": 7.0}
    attributes, given, made = launches({"q_offset": ints(B)}, **static)["forward"]
    told = {
        "window_left": 5,
        "window_right": 2,
        "scale": 0.5,
        "softcap": 7,
        "kernels": 1,
    }
    told |= {"present": 1 << cuda.OPTIONAL.index("shift"), "packed": 0}
    assert {name: attributes[name] for name in told} == told
    assert given == ["2x70x4x64xbf16", "2x130x2x64xbf16", "2x130x2x32xbf16", "2xi32"]
    assert made == ["2x70x4x32xbf16"]  # gradients have lse, too


def test_the_attributes_of_a_call_are_those_that_the_handlers_decode():
    source = Path(__file__).parents[2] / "cpp/ops/attention/attention_ffi.cc"
    text = source.read_text()
    (body,) = re.findall(r"struct AttentionAttributes \{(.*?)\};", text, re.DOTALL)
    fields = [
        (kind, name.strip())
        for kind, names in re.findall(r"(int64_t|float) ([^;]*);", body)
        for name in names.split(",")
    ]
    # The struct is made of the decoded members in their order, whatever their names.
    assert re.findall(r'StructMember<(\w+)>\("(\w+)"\)', text) == fields
    for attributes, _, _ in launches({}, gradients=True).values():
        assert set(attributes) == {name for _, name in fields}


def test_a_causal_call_is_a_window_without_an_end_behind():
    for kernels, number in ("cuda", 0), ("cuda_sm90", 1):
        told = launches({}, causal=True, implementation=kernels)["forward"][0]
        assert (told["window_left"], told["window_right"]) == (-1, 0)
        assert told["scale"] == D**-0.5 and told["softcap"] == 0
        assert told["kernels"] == number and told["present"] == 0


def bits(*names: str) -> int:
    return sum(1 << cuda.OPTIONAL.index(name) for name in names)


SEGMENTS = ("q_segments", "kv_segments", "q_segment_ranges", "kv_segment_ranges")
TILES = ("tile_indices", "tile_counts")
OPERANDS = {
    "lengths": ({"q_lens": ints(B), "kv_lens": ints(B)}, ("q_lens", "kv_lens"), 2),
    "segments": ({"segment_ids": (ints(B, T), ints(B, S))}, SEGMENTS, 4),
    "bias": ({"bias": array(1, N, T, S)}, ("bias",), 1),
    "packed": ({"cu_seqlens": (ints(4), ints(4))}, ("cu_q", "cu_kv"), 2),
}


@pytest.mark.parametrize("operands, present, count", OPERANDS.values(), ids=OPERANDS)
def test_operands_are_told_and_come_in_order(operands, present, count):
    attributes, given, _ = launches(operands)["forward"]
    assert attributes["present"] == bits(*present)
    assert attributes["packed"] == ("cu_q" in present)
    assert len(given) == 3 + count


def test_the_lists_of_tiles_go_backwards_transposed():
    lists = AttentionTiles(ints(1, N, 1, 3), ints(1, N, 1), 128, 128)
    told = launches({"tiles": lists}, gradients=True)
    forward, backward = told["forward"], told["backward_kv"]
    assert forward[0]["present"] == bits(*TILES)
    assert (forward[0]["tile_q"], forward[0]["tile_kv"]) == (128, 128)
    assert forward[1][3:] == ["1x4x1x3xi32", "1x4x1xi32"]
    transposed = (*TILES, "tile_indices_t", "tile_counts_t")
    assert backward[0]["present"] == bits(*transposed)
    # Two tiles of keys, each with at most the one tile of queries.
    assert backward[1][5:7] == ["1x4x2x1xi32", "1x4x2xi32"]


def test_partial_tiles_are_told():
    masks = ints(1, N, 1, 3), array(5, 128, 4, dtype=jnp.uint32)
    lists = AttentionTiles(ints(1, N, 1, 3), ints(1, N, 1), 128, 128, *masks)
    told = launches({"tiles": lists}, gradients=True)
    forward, backward = told["forward"], told["backward_kv"]
    extra = ("tile_map", "tile_masks")
    assert forward[0]["present"] == bits(*TILES, *extra)
    assert forward[1][5:] == ["1x4x1x2xi32", "5x128x4xui32"]
    transposed = ("tile_indices_t", "tile_counts_t")
    assert backward[0]["present"] == bits(*TILES, *transposed, *extra)
    assert backward[1][7:9] == ["1x4x1x2xi32", "5x128x4xui32"]


FEW = 16  # queries; KVBLOCK_MOST_FEW_QUERIES


@pytest.mark.parametrize("implementation", ["cuda", "cuda_sm90"])
@pytest.mark.parametrize("q_len", [1, FEW])
def test_few_queries_have_a_workspace(q_len, implementation):
    """O and lse in float32 of the pieces of any GPU, of up to 64 rows, a word each."""
    few = functools.partial(launches, q_len=q_len, implementation=implementation)
    rows = 16 if q_len == 1 else 32  # of two heads to a key head, in whole blocks
    workspace = f"{2 * 320 * (rows * (E + 1) + 1) * 4}xui8"
    out = f"{B}x{q_len}x{N}x{E}xbf16"
    assert few({"kv_lens": ints(B)})["forward"][2] == [out, workspace]
    with_lse = [out, f"{B}x{N}x{q_len}xf32", workspace]
    assert few({}, gradients=True)["forward"][2] == with_lse


UNEVEN = {
    "kv_lens": {"kv_lens": ints(B)},
    "q_lens": {"q_lens": ints(B)},
    "segments": {"segment_ids": (ints(B, T), ints(B, S))},
    "packed": {"cu_seqlens": (ints(4), ints(4))},
    "tiles": {"tiles": AttentionTiles(ints(1, 1, 1, 1), ints(1, 1, 1), 128, 256)},
}


@pytest.mark.parametrize("operands", UNEVEN.values(), ids=UNEVEN)
def test_where_tiles_are_uneven_hopper_has_a_counter(operands):
    assert launches(operands)["forward"][2][1:] == ["16xui8"]
    assert launches(operands, implementation="cuda")["forward"][2][1:] == []


def test_who_has_no_workspace():
    assert len(launches({}, q_len=FEW + 1)["forward"][2]) == 1
    for operands in {"bias": array(1, N, 4, S)}, {"tiles": UNEVEN["tiles"]["tiles"]}:
        told = launches(operands, q_len=4, implementation="cuda")
        assert len(told["forward"][2]) == 1


def test_the_ranges_of_segments_are_of_64_positions():
    given = launches({"segment_ids": (ints(B, T), ints(B, S))})["forward"][1]
    assert given[5:] == ["2x2x2xi32", "2x3x2xi32"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_sums_of_dq_have_the_size_that_the_header_says(deterministic):
    tile = 64 * 64 * 4 + 3 * 4  # of sums, and three counters
    tiled = launches({}, gradients=True, deterministic=deterministic)["backward_kv"]
    keys = ["2x130x2x64xbf16", "2x130x2x32xbf16"]
    workspace = f"{2 * 4 * 2 * tile}xui8"  # two tiles of 64 queries a head
    assert tiled[2] == [*keys, "2x70x4x64xbf16", workspace]
    assert tiled[0]["deterministic"] == deterministic
    packed = {"cu_seqlens": (ints(4), ints(4))}
    tiled = launches(packed, gradients=True, deterministic=deterministic)["backward_kv"]
    assert tiled[2][3:] == [f"{4 * 4 * tile}xui8"]  # (70 + 64 * 3) / 64
    plain = launches(
        {}, gradients=True, deterministic=deterministic, implementation="cuda"
    )
    blocks = ["4x18x8x8x8xf32"] * (not deterministic)
    assert plain["backward_kv"][2] == [*keys, *blocks]
    assert ("backward_q" in plain) == deterministic


def test_sinks_are_for_forward_alone():
    told = launches({"sinks": array(N, dtype=np.float32)}, gradients=True)
    assert told["forward"][0]["present"] == bits("sinks")
    assert told["backward_kv"][0]["present"] == 0


def test_what_no_kernel_serves_goes_elsewhere_or_is_an_error():
    doubles = [
        array(B, n, h, D, dtype=jnp.float64) for n, h in ((T, N), (S, K), (S, K))
    ]

    def text(arrays, implementation):
        call = functools.partial(flash_attention, implementation=implementation)
        lowered = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",))
        return lowered.as_text()

    with jax.enable_x64(True):
        assert "kvblock_attention" not in text(doubles, None)
        words = "float64 .bfloat16, float16 and float32 are served"
        with pytest.raises(ValueError, match=words):
            text(doubles, "cuda")
    for dtype in (HALF, jnp.float32):
        arrays = [array(*x.shape, dtype=dtype) for x in doubles]
        assert "kvblock_attention" in text(arrays, None)
