"""Every conversion moves every bit, judged by NumPy's transpose and reshape."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FP8, LATENT, ODD_RUN, SMALL, SMOLLM2, SOURCE_TEST, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from model import (
    DTYPES,
    LAYOUTS,
    NAMED,
    assert_same_bits,
    lay,
    layout_of,
    random_bits,
)

import jax_kvblock as kv

PAIRS = [(src, dst) for src in LAYOUTS for dst in LAYOUTS]
PAIR_IDS = [f"{src}-{dst}" for src, dst in PAIRS]
ODD = (
    Case("bytes", 2, 2, 3, 3, 1, "uint8"),
    Case("runs of 17 bytes", 3, 1, 5, 2, 17, "uint8"),
    Case("runs of 31 bytes", 1, 2, 9, 7, 31, "int8"),
    Case("129 floats", 2, 1, 3, 5, 129, "float32"),
    Case("one long run", 1, 1, 1, 1, 70001, "bfloat16"),
    Case("many tokens", 1, 2, 257, 3, 6, "float16"),
    Case("many heads", 2, 1, 2, 129, 10, "bfloat16"),
    Case("tiles", 2, 2, 64, 8, 128, "bfloat16"),
    Case("80 layers", 80, 2, 4, 1, 24, "float8_e5m2"),
)
BATCHES = [(), (1,), (3,), (2, 3), (0,), (2, 0), (1, 2, 1)]
by_batch = pytest.mark.parametrize("batch", BATCHES, ids=str)
by_inner = pytest.mark.parametrize("layout", ["NHD", "HND"])
by_case = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


def spec_of(case: Case, layout: str = "NHD") -> kv.BlockSpec:
    return kv.BlockSpec(*case.dims, jnp.dtype(case.dtype), layout)


def pieces_of(blocks: np.ndarray, layout: str) -> list[list[jax.Array]]:
    """Canonical blocks `[n, …]` as a list of blocks, each a list of nl·no arrays."""
    laid = lay(blocks, layout)
    return [[jnp.asarray(p) for p in x.reshape(-1, *x.shape[2:])] for x in laid]


def assert_pieces(got: object, blocks: np.ndarray, layout: str) -> None:
    assert isinstance(got, list)
    assert len(got) == len(blocks)
    for block, want in zip(got, lay(blocks, layout), strict=True):
        assert isinstance(block, list)
        for piece, expected in zip(
            block, want.reshape(-1, *want.shape[2:]), strict=True
        ):
            assert isinstance(piece, jax.Array)
            assert_same_bits(piece, expected)


def assert_listed(got: object, blocks: np.ndarray, name: str, inner: str) -> None:
    assert isinstance(got, list)
    for x, want in zip(got, lay(blocks, name, inner), strict=True):
        assert isinstance(x, jax.Array)
        assert_same_bits(x, want)


# ---- convert_blocks ------------------------------------------------------------------


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=PAIR_IDS)
@by_case
def test_between_any_two_layouts(rng, case, src, dst):
    blocks = random_bits(rng, (3, *case.dims), case.dtype)
    x = jnp.asarray(lay(blocks, src))
    got = kv.convert_blocks(x, layout_of(src), layout_of(dst), spec_of(case))
    assert_same_bits(got, lay(blocks, dst))


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=PAIR_IDS)
def test_xla_gives_the_same_bits_as_the_kernel(rng, src, dst):
    blocks = random_bits(rng, (2, *ODD_RUN.dims), ODD_RUN.dtype)
    x = jnp.asarray(lay(blocks, src))
    convert = functools.partial(
        kv.convert_blocks, x, layout_of(src), layout_of(dst), spec_of(ODD_RUN)
    )
    want = np.asarray(convert(implementation="xla"))
    assert_same_bits(want, lay(blocks, dst))
    assert_same_bits(convert(implementation="kernel"), want)


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("NHD", "universal"),
        ("universal", "HND"),
        ("HND", "NHD"),
        ("operational", "merged"),
        ("layer_first", "page_first"),
    ],
)
def test_odd_and_long_extents(rng, case, src, dst):
    blocks = random_bits(rng, (2, *case.dims), case.dtype)
    x = jnp.asarray(lay(blocks, src))
    got = kv.convert_blocks(x, layout_of(src), layout_of(dst), spec_of(case))
    assert_same_bits(got, lay(blocks, dst))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("NHD", "universal"),
        ("universal", "HND"),
        ("HND", "operational"),
        ("operational", "NHD"),
        ("merged", "page_first"),
    ],
)
def test_every_dtype_keeps_every_bit(rng, dtype, src, dst):
    with jax.enable_x64(True):
        blocks = random_bits(rng, (5, *SOURCE_TEST.dims), dtype)
        spec = kv.BlockSpec(*SOURCE_TEST.dims, blocks.dtype)
        x = jnp.asarray(lay(blocks, src))
        got = kv.convert_blocks(x, layout_of(src), layout_of(dst), spec)
        assert_same_bits(got, lay(blocks, dst))


@by_batch
@pytest.mark.parametrize(
    ("src", "dst"), [("NHD", "HND"), ("operational", "universal"), ("merged", "NHD")]
)
def test_leading_batch_axes(rng, batch, src, dst):
    blocks = random_bits(rng, (*batch, *LATENT.dims), LATENT.dtype)
    x = jnp.asarray(lay(blocks, src))
    got = kv.convert_blocks(x, layout_of(src), layout_of(dst), spec_of(LATENT))
    assert_same_bits(got, lay(blocks, dst))


@pytest.mark.parametrize(("src", "dst"), [("operational", "NHD"), ("HND", "universal")])
def test_spec_layout_orders_the_inside_of_operational_blocks(rng, src, dst):
    blocks = random_bits(rng, (2, *FP8.dims), FP8.dtype)
    got = kv.convert_blocks(
        jnp.asarray(lay(blocks, src, inner="HND")), src, dst, spec_of(FP8, "HND")
    )
    assert_same_bits(got, lay(blocks, dst, inner="HND"))


def test_an_hnd_layout_object_orders_operational_blocks_as_its_name_does(rng):
    blocks = random_bits(rng, (2, *FP8.dims), FP8.dtype)
    hnd = kv.Layout("HND", "L O H T D")
    spec = spec_of(FP8).replace(layout=hnd)
    got = kv.convert_blocks(jnp.asarray(lay(blocks, "HND")), hnd, "operational", spec)
    assert_same_bits(got, lay(blocks, "operational", inner="HND"))


def test_a_custom_layout_may_bear_a_known_name(rng):
    """What a layout is called is for messages; its axes say what it does."""
    blocks = random_bits(rng, (2, *FP8.dims), FP8.dtype)
    impostor = kv.Layout("NHD", "T L O H D")
    listed = [jnp.asarray(x) for x in lay(blocks, "HND")]
    (first, second) = kv.convert_blocks(listed, "HND", impostor, spec_of(FP8))
    want = lay(blocks, "page_first")
    assert_same_bits(first, want[0])
    assert_same_bits(second, want[1])


def test_numpy_input_is_taken(rng):
    blocks = random_bits(rng, (2, *FP8.dims), FP8.dtype)
    got = kv.convert_blocks(blocks, "NHD", "universal", spec_of(FP8))
    assert isinstance(got, jax.Array)
    assert_same_bits(got, lay(blocks, "universal"))


# ---- the four functions --------------------------------------------------------------


@by_batch
@by_inner
@pytest.mark.parametrize("case", [SOURCE_TEST, LATENT], ids=lambda case: case.name)
def test_universal_there_and_back(rng, case, layout, batch):
    blocks = random_bits(rng, (*batch, *case.dims), case.dtype)
    x = jnp.asarray(lay(blocks, layout))
    universal = kv.block_to_universal(x, layout)
    assert_same_bits(universal, lay(blocks, "universal"))
    assert_same_bits(kv.universal_to_block(universal, layout), lay(blocks, layout))


@by_batch
@by_inner
@pytest.mark.parametrize("case", [SOURCE_TEST, LATENT], ids=lambda case: case.name)
def test_operational_there_and_back(rng, case, layout, batch):
    blocks = random_bits(rng, (*batch, *case.dims), case.dtype)
    x = jnp.asarray(lay(blocks, layout))
    packed = kv.block_to_operational(x, layout)
    assert_same_bits(packed, lay(blocks, "operational", layout))
    heads = {"num_kv_heads": case.num_kv_heads, "head_dim": case.head_dim}
    for how in (heads, {"spec": spec_of(case, layout)}):
        back = kv.operational_to_block(packed, layout, **how)
        assert_same_bits(back, lay(blocks, layout))


@by_inner
@by_case
def test_a_spec_changes_nothing_when_it_fits(rng, case, layout):
    blocks = random_bits(rng, (2, *case.dims), case.dtype)
    x, spec = jnp.asarray(lay(blocks, layout)), spec_of(case)
    universal = kv.block_to_universal(x, layout, spec=spec)
    assert_same_bits(universal, lay(blocks, "universal"))
    back = kv.universal_to_block(universal, layout, spec=spec)
    assert_same_bits(back, lay(blocks, layout))


@by_inner
def test_the_layout_argument_rules_over_the_spec(rng, layout):
    """`spec` tells the extents; which order a piece has is said by `layout`."""
    other = {"NHD": "HND", "HND": "NHD"}[layout]
    blocks = random_bits(rng, (2, *FP8.dims), FP8.dtype)
    x, spec = jnp.asarray(lay(blocks, layout)), spec_of(FP8, other)
    packed = kv.block_to_operational(x, layout, spec=spec)
    assert_same_bits(packed, lay(blocks, "operational", layout))
    back = kv.operational_to_block(packed, layout, spec=spec)
    assert_same_bits(back, lay(blocks, layout))


@pytest.mark.parametrize("implementation", [None, "kernel", "xla"])
@by_inner
def test_implementations_agree(rng, layout, implementation):
    blocks = random_bits(rng, (2, *SMOLLM2.dims), SMOLLM2.dtype)
    x = jnp.asarray(lay(blocks, layout))
    universal = kv.block_to_universal(x, layout, implementation=implementation)
    assert_same_bits(universal, lay(blocks, "universal"))
    back = kv.universal_to_block(universal, layout, implementation=implementation)
    assert_same_bits(back, lay(blocks, layout))


# ---- lists: nb blocks of nl·no pieces ------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 3])
@by_inner
@by_case
def test_lists_to_universal_and_back(rng, case, layout, num_blocks):
    blocks = random_bits(rng, (num_blocks, *case.dims), case.dtype)
    pieces = pieces_of(blocks, layout)
    universal = kv.block_to_universal(pieces, layout, num_outer=case.num_outer)
    assert_listed(universal, blocks, "universal", layout)
    assert_pieces(kv.universal_to_block(universal, layout), blocks, layout)


@pytest.mark.parametrize("num_blocks", [1, 3])
@by_inner
@by_case
def test_lists_to_operational_and_back(rng, case, layout, num_blocks):
    blocks = random_bits(rng, (num_blocks, *case.dims), case.dtype)
    pieces = pieces_of(blocks, layout)
    packed = kv.block_to_operational(pieces, layout, spec=spec_of(case))
    assert_listed(packed, blocks, "operational", layout)
    back = kv.operational_to_block(
        packed, layout, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim
    )
    assert_pieces(back, blocks, layout)


@pytest.mark.parametrize("dst", LAYOUTS)
@pytest.mark.parametrize("src", LAYOUTS)
def test_convert_blocks_takes_lists_of_arrays(rng, src, dst):
    case, blocks = SOURCE_TEST, random_bits(rng, (2, *SOURCE_TEST.dims), "float32")
    listed = [jnp.asarray(x) for x in lay(blocks, src)]
    got = kv.convert_blocks(listed, layout_of(src), layout_of(dst), spec_of(case))
    if dst in ("NHD", "HND"):
        assert_pieces(got, blocks, dst)
    else:
        assert_listed(got, blocks, dst, "NHD")


@pytest.mark.parametrize("dst", LAYOUTS)
@by_inner
def test_convert_blocks_takes_lists_of_pieces(rng, layout, dst):
    case, blocks = LATENT, random_bits(rng, (2, *LATENT.dims), LATENT.dtype)
    pieces = tuple(tuple(block) for block in pieces_of(blocks, layout))
    got = kv.convert_blocks(pieces, layout, layout_of(dst), spec_of(case))
    if dst in ("NHD", "HND"):
        assert_pieces(got, blocks, dst)
    else:
        assert_listed(got, blocks, dst, "NHD")


def test_lists_of_hundreds_of_pieces(rng):
    """640 pointers: more than one kernel's 4 KiB of parameters can hold."""
    case = Case("long list", 32, 2, 2, 3, 4, "bfloat16")
    blocks = random_bits(rng, (10, *case.dims), case.dtype)
    universal = kv.block_to_universal(pieces_of(blocks, "NHD"))
    assert_listed(universal, blocks, "universal", "NHD")
    assert_pieces(kv.universal_to_block(universal, "HND"), blocks, "HND")


def test_lists_under_jit(rng):
    blocks = random_bits(rng, (2, *FP8.dims), FP8.dtype)
    there = jax.jit(kv.block_to_universal, static_argnames="layout")
    back = jax.jit(kv.universal_to_block, static_argnames="layout")
    universal = there(pieces_of(blocks, "HND"), layout="HND")
    assert_listed(universal, blocks, "universal", "HND")
    assert_pieces(back(universal, layout="NHD"), blocks, "NHD")


def test_empty_lists_give_empty_lists():
    spec = spec_of(FP8)
    assert kv.block_to_universal([]) == []
    assert kv.universal_to_block([]) == []
    assert kv.block_to_operational([]) == []
    assert kv.operational_to_block([], spec=spec) == []
    assert kv.operational_to_block([], num_kv_heads=2, head_dim=4) == []
    assert kv.convert_blocks([], "NHD", "universal", spec) == []


# ---- who computes the operational pair -----------------------------------------------


def check_implementation(
    rng: np.random.Generator, implementation: str | None, case: Case
) -> None:
    for layout in ("NHD", "HND"):
        blocks = random_bits(rng, (3, *case.dims), case.dtype)
        packed = kv.block_to_operational(
            jnp.asarray(lay(blocks, layout)), layout, implementation=implementation
        )
        assert_same_bits(packed, lay(blocks, "operational", layout))
        back = kv.operational_to_block(
            packed, layout, spec=spec_of(case), implementation=implementation
        )
        assert_same_bits(back, lay(blocks, layout))
        listed = kv.block_to_operational(
            pieces_of(blocks, layout),
            layout,
            spec=spec_of(case),
            implementation=implementation,
        )
        assert_listed(listed, blocks, "operational", layout)
        unpacked = kv.operational_to_block(
            listed, layout, spec=spec_of(case), implementation=implementation
        )
        assert_pieces(unpacked, blocks, layout)


@by_case
@pytest.mark.parametrize("implementation", [None, "kernel", "xla"])
def test_implementations_that_run_everywhere(rng, implementation, case):
    check_implementation(rng, implementation, case)


@pytest.mark.gpu
@by_case
@pytest.mark.parametrize("implementation", ["batch", "async"])
def test_copy_calls_of_cuda(rng, implementation, case):
    check_implementation(rng, implementation, case)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["batch", "async"])
def test_copy_calls_of_cuda_inside_a_jit(rng, implementation):
    blocks = random_bits(rng, (4, *SMOLLM2.dims), SMOLLM2.dtype)

    @jax.jit
    def negate_bits_then_pack(x):
        return kv.block_to_operational(~x, implementation=implementation) ^ 1

    got = negate_bits_then_pack(jnp.asarray(blocks.view(np.int32)))
    assert_same_bits(got, lay(~blocks.view(np.int32) ^ 1, "operational"))


@pytest.mark.parametrize("implementation", ["batch", "async"])
def test_copy_calls_of_cuda_refuse_the_cpu(implementation):
    cpu = jax.devices("cpu")[0]
    x = jax.device_put(np.zeros((2, *SOURCE_TEST.dims), np.float32), cpu)
    said = rf"(?s)implementation='{implementation}'.*cpu.*'kernel'"
    with pytest.raises(ValueError, match=said):
        kv.block_to_operational(x, implementation=implementation)
    packed = jax.device_put(np.zeros((2, 3, 2, 40), np.float32), cpu)
    with pytest.raises(ValueError, match=said):
        kv.operational_to_block(
            packed, num_kv_heads=4, head_dim=5, implementation=implementation
        )


def test_the_pair_takes_backend_for_implementation():
    x = jnp.zeros((2, *SOURCE_TEST.dims), np.float32)

    def program(**named):
        return str(jax.make_jaxpr(lambda x: kv.block_to_operational(x, **named))(x))

    assert program(backend="auto") == program()
    for name in ("kernel", "batch", "async"):
        assert program(backend=name) == program(implementation=name) != program()


@pytest.mark.parametrize("implementation", ["kernel", "batch"])
def test_what_is_asked_for_and_not_here_is_an_error(implementation):
    """Elsewhere than on a CPU or an NVIDIA GPU nothing but XLA serves."""
    x = jnp.zeros((2, *SOURCE_TEST.dims), np.float32)

    def lowered(implementation):
        f = functools.partial(kv.block_to_operational, implementation=implementation)
        return jax.jit(f).trace(x).lower(lowering_platforms=("tpu",)).as_text()

    with pytest.raises(ValueError, match=rf"'{implementation}'.*platform.*'xla' or N"):
        lowered(implementation)
    assert "kvblock" not in lowered(None) + lowered("xla")


# ---- any shape, any dtype ------------------------------------------------------------


@st.composite
def drawn_blocks(draw):
    dims = tuple(
        draw(st.integers(1, top), label=axis)
        for axis, top in (("nl", 3), ("no", 2), ("nt", 9), ("nh", 5), ("hd", 40))
    )
    batch = tuple(draw(st.lists(st.integers(0, 3), max_size=2), label="batch"))
    seed = draw(st.integers(0, 2**32 - 1), label="seed")
    dtype = draw(st.sampled_from(DTYPES), label="dtype")
    return random_bits(np.random.default_rng(seed), (*batch, *dims), dtype)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    blocks=drawn_blocks(),
    path=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3),
    implementation=st.sampled_from(["kernel", "xla"]),
)
def test_a_walk_through_layouts_returns_every_bit(blocks, path, implementation):
    with jax.enable_x64(True):
        spec = kv.BlockSpec(*blocks.shape[-5:], blocks.dtype)
        x, stops = jnp.asarray(blocks), ["NHD", *path, "NHD"]
        for src, dst in itertools.pairwise(stops):
            x = kv.convert_blocks(
                x, layout_of(src), layout_of(dst), spec, implementation=implementation
            )
            assert_same_bits(x, lay(blocks, dst))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    blocks=drawn_blocks(),
    layout=st.sampled_from(["NHD", "HND"]),
    middle=st.sampled_from([n for n in NAMED if n not in ("NHD", "HND")]),
)
def test_list_round_trips(blocks, layout, middle):
    blocks = blocks.reshape(-1, *blocks.shape[-5:])
    with jax.enable_x64(True):
        spec = kv.BlockSpec(*blocks.shape[-5:], blocks.dtype, layout)
        pieces = pieces_of(blocks, layout)
        packed = kv.convert_blocks(pieces, layout, middle, spec)
        assert_listed(packed, blocks, middle, layout)
        back = kv.convert_blocks(packed, middle, layout, spec)
        assert_pieces(back, blocks, layout)
