"""The examples run, and say what they promise to say."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_examples import EXAMPLES, Load, run
from smollm2_here import skip_without_model

from jax_kvblock.graphs import EngineBlock

pytestmark = pytest.mark.early


def can_plot() -> bool:
    """The test extra has matplotlib; what else a GPU's machine has is its own."""
    on_gpu = jax.default_backend() == "gpu"
    return not on_gpu or importlib.util.find_spec("matplotlib") is not None


def test_a_model_decodes_on_from_a_cache_that_was_moved() -> None:
    skip_without_model()
    printed = run("demo.py")
    assert "the same text, token for token" in printed
    assert "GB/s" in printed


def test_the_demo_tells_what_it_is_before_it_fetches_a_model() -> None:
    printed = run("demo.py", "--help")
    assert "usage: demo.py" in printed and "running on" not in printed


def test_a_gpt_learns_the_same_with_flash_and_with_plain_attention(
    tmp_path: pathlib.Path,
) -> None:
    options = ["--quick"]
    plot = tmp_path / "loss.svg"
    if can_plot():
        options += ["--plot", str(plot)]
    printed = run("train_gpt.py", *options)
    assert "the same curve" in printed
    found = re.findall(r"(\w+) +attention: +([\d,]+) tokens .* ([\d.]+) MiB", printed)
    assert [name for name, _, _ in found] == ["flash", "plain"]
    flash, plain = (float(mebibytes) for *_, mebibytes in found)
    assert flash < plain
    assert plot.exists() == ("--plot" in options)


@pytest.mark.cpu
def test_a_gpt_learns_the_same_with_products_of_8_bits(
    tmp_path: pathlib.Path,
) -> None:
    options = ["--quick", "--fp8", "--out", str(tmp_path), "--commit", "0123abc"]
    plot = tmp_path / "loss.svg"
    if can_plot():
        options += ["--plot", str(plot)]
    printed = run("train_gpt.py", *options)
    assert "the same curve" in printed
    if "--plot" in options:
        drawn = plot.read_text(encoding="utf-8")
        assert all(f">{name}<" in drawn for name in ("8 bits", "bfloat16", "float32"))
    assert "8 bits: 40 steps, 0 skipped" in printed
    (file,) = tmp_path.glob("*/training-loss-*.json")
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["commit"] == "0123abc" and "jaxlib" in document["versions"]
    (case,) = {row["case"] for row in document["rows"]}
    assert re.fullmatch(
        r"GPT of 123,200 parameters, .* 4 x 128 tokens / 40 steps", case
    )
    losses: dict[str, list[float]] = {}
    counts: dict[str, float] = {}
    for row in document["rows"]:
        if "loss" in row["metric"]:
            losses.setdefault(row["implementation"], []).append(row["value"])
        else:
            assert row["implementation"] == "jax_kvblock, 8 bits"
            counts[row["metric"]] = row["value"]
    assert 0 < counts.pop("saturated") < 40 * 24  # of two layers, a tensor a step
    assert counts == {"steps": 40, "overflows": 0}
    names = ("bfloat16", "8 bits", "float32")
    assert list(losses) == [f"jax_kvblock, {name}" for name in names]
    (mean, *wide), (_, *narrow), (_, *exact) = losses.values()
    assert len(wide) == 40 and mean == pytest.approx(np.mean(wide[-10:]), rel=1e-5)
    # Rounded to 16 bits and to 8, and no more.
    apart = [np.abs(np.subtract(wide, other)).max() for other in (narrow, exact)]
    assert 1e-6 < apart[1] < 0.1 * apart[0] < 0.005


@pytest.mark.cpu
def test_a_gpt_learns_the_same_on_four_devices() -> None:
    options = ["--quick", "--context-parallel", "4", "--cpu-devices", "4"]
    printed = run("train_gpt.py", *options)
    assert "the same curve" in printed
    apart = re.search(r"at most ([\de.+-]+) nats apart", printed)
    assert apart is not None
    assert 0 < float(apart[1]) < 0.002  # other sums, and so other roundings


@pytest.mark.cpu
def test_attention_over_four_devices_by_length(tmp_path: pathlib.Path) -> None:
    options = ["--cpu-devices", "4", "--lengths", "256", "512"]
    plot = tmp_path / "long.svg"
    if can_plot():
        options += ["--plot", str(plot)]
    options += ["--out", str(tmp_path / "out"), "--commit", "0123abc"]
    printed = run("long_context.py", *options)
    assert "over 4 x cpu" in printed
    assert len(re.findall(r"^ +\d+ +[\d.]+ +[\d.]+ ", printed, re.M)) == 2
    assert "rows and gradients that were looked at are right" in printed
    assert plot.exists() == ("--plot" in options)
    (path,) = (tmp_path / "out").glob("*/long-context-*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["commit"] == "0123abc"
    rows = {(row["case"], row["metric"]): row["value"] for row in record["rows"]}
    for length in (256, 512):
        case = f"B1 H4/2 S{length} D16 causal"
        assert (
            rows[f"{case} / forward", "time"] > 0 and rows[f"{case} / both", "time"] > 0
        )
        assert f"{rows[f'{case} / both', 'memory']:.1f}" in printed
    assert len(rows) == len(record["rows"]) == 6


@pytest.mark.slow
def test_facts_are_found_with_a_tenth_of_the_tiles() -> None:
    printed = run("sparse_retrieval.py", "--quick")
    line = r"^ *([a-z][a-z +]+?)" + 4 * r" +([\d.]+)" + "$"
    found = re.findall(line, printed, re.MULTILINE)
    lines = {name: [float(x) for x in numbers] for name, *numbers in found}
    assert len(lines) == 10
    right = {name: numbers[3] for name, numbers in lines.items()}
    recall = {name: numbers[1] for name, numbers in lines.items()}
    assert right["dense"] > 0.9 and recall["dense"] == 1
    for name in ("random", "block sparse", "strided", "local + global", "streaming"):
        assert right[name] < 0.4 and lines[name][0] < 0.12
        assert recall[name] < recall["threshold"] - 0.1
    for name in ("threshold", "pooled", "learned", "oracle"):
        assert right["dense"] - right[name] < 0.1
    assert recall["random"] < recall["learned"] <= recall["oracle"]


def test_kernels_of_other_compilers() -> None:
    printed = run("other_compilers.py")
    for compiler in ("triton", "numba", "cutlass", "cutile"):  # or it is not installed
        assert re.search(compiler, printed, re.IGNORECASE)
    kept = EXAMPLES.parent / "tests/support/ptx"
    printed = run("other_compilers.py", "--kept", str(kept))
    assert len(re.findall("traced and lowered|as jnp", printed)) == 4
    on_gpu = jax.default_backend() == "gpu"
    assert ("not run: there is none here" in printed) != on_gpu


# ---- paged_decode --------------------------------------------------------------------


# The model itself takes as long as all other tests here: `make test` leaves it out.
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--random"], id="random"),
        pytest.param([], id="smollm2", marks=pytest.mark.wide),
    ],
)
def test_sequences_of_all_lengths_decode_as_with_dense_attention(
    options: list[str],
) -> None:
    if not options:
        skip_without_model()
    printed = run("paged_decode.py", *options)
    assert re.search(r"float32 chooses the same \d{3} tokens", printed)
    assert re.search(r"^traces +2, for 64 and 4 rows$", printed, re.MULTILINE)
    # Everything that may happen did: waiting, chunks beside decoding, being put back.
    assert int(re.findall(r"for want of blocks: (\d+)", printed)[0]) > 0
    steps = re.findall(r"^  .{13} ([Rd. ]+)$", printed, re.MULTILINE)
    assert len(steps) == 8
    columns = list(zip(*(line.ljust(99) for line in steps), strict=True))
    assert any({"R", "d"} <= set(column) for column in columns)
    assert all(sum(column.count(c) for c in "Rd") <= 4 for column in columns)


# Each takes what `paged_attention` takes, and gives it something else.
MISTAKES: dict[str, Callable[..., Any]] = {
    "one key too few": lambda attend, q, pool, layer, tables, lens, **to: attend(
        q, pool, layer, tables, lens - 1, **to
    ),
    "a block of another": lambda attend, q, pool, layer, tables, lens, **to: attend(
        q, pool, layer, tables.at[1, 1].set(tables[0, 0]), lens, **to
    ),
    "a layer of another": lambda attend, q, pool, layer, *of, **to: attend(
        q, pool, layer // 2, *of, **to
    ),
    "no mask": lambda attend, *of, **to: attend(*of, causal=False, **to),
    "a row of another": lambda attend, *of, query_start: attend(
        *of, query_start=query_start.at[1].add(1)
    ),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_dense_attention_notices_a_mistake(
    mistake: str | None, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged_decode = load("paged_decode")
    if mistake is not None:
        attend = paged_decode.paged_attention
        wrong = functools.partial(MISTAKES[mistake], attend)
        monkeypatch.setattr(paged_decode, "paged_attention", wrong)
    with jax.default_matmul_precision("float32"):
        model = paged_decode.random_model()
        paged_decode.serve(model)
        if mistake is None:
            assert paged_decode.check_against_dense(model) == 139
            return
        with pytest.raises(SystemExit, match="dense attention chooses"):
            paged_decode.check_against_dense(model)


# ---- graphs of kernels ---------------------------------------------------------------


def test_a_kernel_adds_as_many_as_its_parameter_says() -> None:
    printed = run("vector_add.py")
    assert re.search(
        r"^101 launches: 1 compiled, 100 with a new N, of \d+ to 1024; all sums are "
        r"right$",
        printed,
        re.MULTILINE,
    )


@pytest.mark.cpu
@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b, n: jnp.where(jnp.arange(a.size) < n - 1, a + b, jnp.nan),
        lambda a, b, n: jnp.where(jnp.arange(a.size) < n, a, jnp.nan),
    ],
    ids=["one too few", "no sum"],
)
def test_vector_add_notices_a_mistake(
    wrong: Callable[..., Any], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("vector_add")
    monkeypatch.setattr(example, "add_in_jax", wrong)
    with pytest.raises(SystemExit, match="the sums of 1024 are wrong"):
        example.main()


@pytest.mark.cpu
def test_vector_add_notices_a_new_number_that_is_lost(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("vector_add")
    monkeypatch.setattr(EngineBlock, "set", lambda self, **values: None)
    with pytest.raises(SystemExit, match="compiled again, or was lost"):
        example.main()


def test_particles_are_where_float64_has_them(tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "particles.svg"
    printed = run("particles.py", "--picture", str(picture))
    assert "SphereEmitter → GravityForce → DragForce → Integrate" in printed
    assert "256 frames, 1,536 particles alive, 2,048 at most" in printed
    assert "engine:  256 frames, 1 compilation, 765 new values" in printed
    first, second = map(float, re.findall(r"([\d.]+) m\b", printed))
    assert 0.02 < second < first < 0.1
    assert "nothing compiled again" in printed
    drawn = (EXAMPLES.parent / "docs/particles.svg").read_text(encoding="utf-8")
    assert_same_picture(picture.read_text(encoding="utf-8"), drawn)


# The function that is another, and what it is instead; and what is noticed.
WRONG_PARTICLES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "rows behind the last are pulled, too": (
        "gravity",
        lambda right, rows, *of: right(rows, *of[:-1], len(rows)),
        "behind the last particle",
    ),
    "half the drag": (
        "drag",
        lambda right, rows, coefficient, *of: right(rows, coefficient / 2, *of),
        "from where float64 has it",
    ),
    "nobody grows older": (
        "integrate",
        lambda right, rows, *of: right(rows, *of).at[:, 6].set(rows[:, 6]),
        "the counts are",
    ),
    "one too few is born": (
        "emit",
        lambda right, config, last, count, rate, *of: right(
            config, last, count, rate - 1, *of
        ),
        "the counts are",
    ),
    "one particle twice": (
        "emit",
        lambda right, *of: (right(*of)[0].at[1].set(right(*of)[0][0]), right(*of)[1]),
        "from where float64 has it",
    ),
}


@pytest.mark.cpu
@pytest.mark.parametrize("mistake", WRONG_PARTICLES)
def test_particles_notice_a_mistake(
    mistake: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("particles")
    name, wrong, noticed = WRONG_PARTICLES[mistake]
    right = getattr(example, name)
    monkeypatch.setattr(example, name, functools.partial(wrong, right))
    pulls = np.full(example.FRAMES, 9.81, np.float32)
    with pytest.raises(SystemExit, match=noticed):
        example.check_animation(example.particle_system(), pulls)


@pytest.mark.cpu
def test_particles_notice_a_wrong_step(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's frames are compared, and so is its DeltaTime with what is exact."""
    example = load("particles")
    for name, less in (("FRAMES", 100), ("LIFETIME", 10), ("LIFE_FRAMES", 640)):
        monkeypatch.setattr(example, name, less)
    graph, pulls = example.particle_system(), np.full(100, 3, np.float32)
    last = example.check_animation(graph, pulls)
    with pytest.raises(SystemExit, match="from the jit's"):
        example.check_engine(graph, pulls + np.float32(1e-3), last)
    closed_form = example.closed_form
    wrong = functools.partial(closed_form, time=1 - 1 / 64)
    monkeypatch.setattr(
        example, "closed_form", lambda start, pull, _: wrong(start, pull)
    )
    with pytest.raises(SystemExit, match="errors of a second's path"):
        example.check_engine(graph, pulls, last)


def test_the_picture_of_the_particles_is_whole() -> None:
    """Whole lives from the same place on, a new one in each frame; no script."""
    file = EXAMPLES.parent / "docs/particles.svg"
    assert file.stat().st_size < 400_000
    root = ElementTree.parse(file).getroot()
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert "circle" in names and not names & {"script", "image", "foreignObject"}
    space = {"": "http://www.w3.org/2000/svg"}
    begins, starts = [], []
    for group in root.findall("g", space):
        (fill, _), circles = group.findall("animate", space), group.findall("*", space)
        begins.append(float(fill.get("begin", "").rstrip("s")))
        for circle in circles[2:]:
            (motion,) = circle.findall("animateMotion", space)
            assert motion.get("begin") == fill.get("begin")
            assert motion.get("dur") == fill.get("dur") == "3s"
            offset = motion.get("values", "").split(";")[0].split(",")
            at = float(circle.get("cx", "")), float(circle.get("cy", ""))
            starts.append(np.add(at, np.array(offset, float)))
    np.testing.assert_allclose(
        begins, np.linspace(-3, 0, 96, endpoint=False), atol=1e-3
    )
    panels = np.array(starts).reshape(96, 3, 3, 2)
    middle = panels.mean(axis=(0, 2))
    assert np.abs(panels - middle[:, None]).max() < 10  # a frame's way from the sphere
    assert (np.diff(middle[:, 0]) > 200).all()


def assert_same_picture(one: str, other: str) -> None:
    """But for rounding: XLA computes a cosine another way on another machine."""
    number = re.compile(r"-?\d+\.\d+")
    texts = [number.sub("#", text) for text in (one, other)]
    assert texts[0] == texts[1], "run python examples/particles.py --picture"
    values = [np.array(number.findall(text), np.float64) for text in (one, other)]
    np.testing.assert_allclose(*values, atol=0.11)


# ---- kernels of one's own ------------------------------------------------------------


def test_blocks_are_quantized_by_a_kernel_of_ones_own() -> None:
    printed = run("quantize_blocks.py")
    found = re.search(r"4 blocks: ([\d,]+) bytes for ([\d,]+)", printed)
    assert found is not None
    ours, theirs = (int(number.replace(",", "")) for number in found.groups())
    assert ours / theirs == (128 + 4) / 256


def test_a_product_with_weights_in_four_bits() -> None:
    printed = run("w4a16.py")
    assert "in 4.25 bits a number" in printed
    rows = re.findall(r"(\d+) rows: largest difference ([\d.e-]+)", printed)
    assert [number for number, _ in rows] == ["1", "4", "16"]
