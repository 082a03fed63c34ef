"""The particle system of the examples: its graphs, its kernels, and their fallbacks.

Each graph is compared with NumPy in float64, by its fallbacks, by the kernels as C++
behind a driver that stands in, and on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_kernels import emulate

from jax_kvblock import kernels
from jax_kvblock.graphs import Engine, State
from jax_kvblock.kernels.ptx import Loaded

EXAMPLES = Path(__file__).parents[2] / "examples"
KERNELS = ("emit", "gravity", "drag", "integrate")
CONFIG = np.array([1, 2, 3, 0.5, 0.25, 4, -1, 1.5], np.float32)


@pytest.fixture
def where(everywhere: str, request: pytest.FixtureRequest) -> str:
    if everywhere == "emulator":
        driver = request.getfixturevalue("kernel_handlers")
        factory = request.getfixturevalue("tmp_path_factory")
        source = EXAMPLES / "particles.cu"
        made = [kernels.from_cuda(source, name) for name in KERNELS]
        emulate(driver, factory, "particles", source.read_text(), *made)
    return everywhere


@pytest.fixture
def particles(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("particles")


def random_rows(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Particles with numbers of their own, and half of them older than 1."""
    made = rng.standard_normal((rows, 8)).astype(np.float32)
    made[:, 6] = rng.uniform(0, 2, rows)
    made[:, 7] = rng.permutation(10 * rows)[:rows]
    return made


def by_number(rows: Any) -> np.ndarray:
    rows = np.asarray(rows)
    return rows[np.argsort(rows[:, 7])]


# ---- the truth, in float64 -----------------------------------------------------------


def hashed(bits: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = ((bits ^ (bits >> shift)) * factor) % 2**32
    return bits ^ (bits >> 16)


def new_particle(number: int, seed: int) -> list[float]:
    u, v, w = (
        (hashed(hashed(seed) ^ (4 * number + draw)) >> 8) / 2**24 for draw in range(3)
    )
    side = np.sqrt(1 - (2 * u - 1) ** 2)
    angle = 2 * np.pi * v
    outward = np.array([side * np.cos(angle), 2 * u - 1, side * np.sin(angle)])
    center, radius, velocity, spread = np.split(CONFIG.astype(np.float64), (3, 4, 7))
    position = center + radius * outward
    return [*position, *(velocity + spread * np.sqrt(w) * outward), 0.0, number]


def emitted(
    last: np.ndarray, rate: int, first: int, seed: int, lifetime: float
) -> np.ndarray:
    """By number: those of `last` that are alive, and new ones."""
    new = [new_particle(first + i, seed) for i in range(rate)]
    alive = last[last[:, 6] < lifetime]
    return by_number(np.concatenate([alive, np.array(new).reshape(-1, 8)]))


def pulled(rows: np.ndarray, strength: float, delta_time: float) -> np.ndarray:
    return rows - strength * delta_time * np.eye(8)[4]


def slowed(rows: np.ndarray, coefficient: float, delta_time: float) -> np.ndarray:
    factor = np.ones(8)
    factor[3:6] = np.exp(-coefficient * delta_time)
    return rows * factor


def moved(rows: np.ndarray, delta_time: float) -> np.ndarray:
    new = rows.copy()
    new[:, :3] += rows[:, 3:6] * delta_time
    new[:, 6] += delta_time
    return new


# ---- each graph ----------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0, 5, 60])
@pytest.mark.parametrize("count", [0, 1, 37, 50])
def test_the_emitter_keeps_who_is_alive_and_adds_new_ones(
    where: str, count: int, rate: int, particles: ModuleType, rng: np.random.Generator
) -> None:
    last = random_rows(rng, 50)
    scalars = {"Rate": rate, "First": 1000, "Seed": 7, "Lifetime": 1.0}
    run = jax.jit(particles.sphere_emitter(120))
    made = run(CONFIG, last, Count=jnp.int32(count), **scalars)
    want = emitted(last[:count].astype(np.float64), rate, 1000, 7, 1.0)
    if count == 50:
        assert rate < len(want) < rate + count
    assert int(made["Particles Count"]) == len(want)
    assert not made["Particles Overflowed"]
    rows = np.asarray(made["Particles"])
    assert rows.shape == (120, 8) and not rows[len(want) :].any()
    np.testing.assert_allclose(by_number(rows[: len(want)]), want, atol=3e-6)


def test_each_seed_and_number_is_another_particle(
    where: str, particles: ModuleType
) -> None:
    run = jax.jit(particles.sphere_emitter(300))
    last = np.zeros((1, 8), np.float32)
    scalars = {"Count": 0, "Rate": 150, "Lifetime": 1.0}
    made = [
        np.asarray(run(CONFIG, last, First=first, Seed=seed, **scalars)["Particles"])
        for first, seed in ((0, 0), (150, 0), (0, 1), (0, 2**31 - 1))
    ]
    starts = np.concatenate([rows[:150, :6] for rows in made])
    assert len(np.unique(starts, axis=0)) == len(starts) == 600
    # Evenly over the sphere, whose radius they have: six standard deviations.
    outward = (starts[:, :3] - CONFIG[:3]) / CONFIG[3]
    np.testing.assert_allclose(np.linalg.norm(outward, axis=1), 1, rtol=1e-5)
    assert np.abs(outward.mean(axis=0)).max() < 6 * np.sqrt(1 / 3 / len(starts))


@pytest.mark.parametrize("capacity", [24, 25, 100])
def test_what_finds_no_room_is_told(
    where: str, capacity: int, particles: ModuleType
) -> None:
    graph = particles.particle_system(capacity)
    last = np.zeros((20, 8), np.float32)
    last[:, 7] = np.arange(20)
    with Engine() as engine:
        block = engine.register(graph)
        block.set(Count=20, Rate=5, First=20)
        made = block(CONFIG, last)
        want = min(25, capacity)
        assert int(made["Particles Count"]) == want
        assert bool(made["Particles Overflowed"]) == (capacity < 25)
        info = block.debug_info
        assert info.append_counts == {"Particles": want}
        assert info.state is (State.WARNING if capacity < 25 else State.OK)
    rows = np.asarray(made["Particles"])
    numbers = rows[:want, 7].tolist()
    assert len({*numbers}) == want and {*numbers} <= {*range(25)}
    assert (rows[:want, 6] == np.float32(particles.DELTA_TIME)).all()
    assert not rows[want:].any()


UPDATES: dict[str, tuple[Callable[..., np.ndarray], dict[str, str]]] = {
    "gravity": (pulled, {"Strength": "strength"}),
    "drag": (slowed, {"Coefficient": "coefficient"}),
    "integrate": (moved, {}),
}


@pytest.mark.parametrize("count", [0, 299, 300])
@pytest.mark.parametrize("entry", UPDATES)
def test_updates_are_those_of_float64(
    where: str, entry: str, count: int, particles: ModuleType, rng: np.random.Generator
) -> None:
    truth, own = UPDATES[entry]
    names = {**own, "DeltaTime": "delta_time", "Count": "count"}
    graph = particles.update(entry, entry, getattr(particles, entry), names)
    values = dict(zip(names, rng.uniform(0.5, 2, len(names) - 1), strict=False))
    rows = random_rows(rng, 300)
    hot = {name: jnp.float32(value) for name, value in values.items()}
    made = jax.jit(graph)(rows, **hot, Count=jnp.int32(count))["Particles"]
    want = truth(rows.astype(np.float64), *values.values())
    assert np.abs(want - rows).max() > 0.1
    np.testing.assert_allclose(made[:count], want[:count], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(made[count:], rows[count:])


# ---- all of them ---------------------------------------------------------------------


def test_frames_are_those_of_float64(where: str, particles: ModuleType) -> None:
    """Every parameter changes from frame to frame."""
    graph = particles.particle_system(200)
    last, count, first = np.zeros((200, 8), np.float32), jnp.int32(0), 0
    want = np.zeros((0, 8))
    with Engine() as engine:
        block = engine.register(graph)
        for frame in range(24):
            rate, seed, lifetime = 3 + frame % 7, frame // 3, 0.4 + 0.01 * frame
            strength, coefficient, delta_time = 9 - frame, 0.1 * frame, 0.05
            delta_time += 0.001 * frame
            block.set(Count=count, Rate=rate, First=first, Seed=seed)
            block.set(Lifetime=lifetime, DeltaTime=delta_time)
            block.set(Gravity=strength, DragCoeff=coefficient)
            made = block(CONFIG, last)
            last, count = made["Particles"], made["Particles Count"]
            want = emitted(want, rate, first, seed, lifetime)
            want = pulled(want, strength, delta_time)
            want = moved(slowed(want, coefficient, delta_time), delta_time)
            first += rate
            assert int(count) == len(want)
        assert engine.cold_rebuilds == 1
    assert 0 < len(want) < first
    rows = np.asarray(last)
    np.testing.assert_allclose(by_number(rows[: len(want)]), want, atol=2e-5)
    assert not rows[len(want) :].any()


def test_the_graph_is_a_value(
    particles: ModuleType, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built again, it is the same, and nothing is compiled again."""
    graph, again = particles.particle_system(64), particles.particle_system(64)
    assert graph is not again and graph == again and hash(graph) == hash(again)
    assert graph != particles.particle_system(65)
    with Engine() as engine:
        for each in (graph, again):
            engine.register(each)(CONFIG, np.zeros((64, 8), np.float32))
        assert (engine.launches, engine.cold_rebuilds) == (2, 1)
    monkeypatch.setattr(particles, "CAPACITY", 64)

    def animate(graph: Any, pull: float, drag: float, rate: int) -> None:
        pulls = np.full(9, pull, np.float32)
        particles.animate(graph, pulls, jnp.float32(drag), jnp.int32(rate))

    animate(graph, 1.0, 2.0, 3)
    before = len(compiles)
    animate(again, -9.0, 0.5, 4)
    assert len(compiles) == before
    monkeypatch.setattr(particles, "gravity", lambda rows, *_: rows)
    assert particles.particle_system(64) != graph


# ---- the kernels ---------------------------------------------------------------------


@pytest.mark.parametrize("entry", KERNELS)
def test_kernels_compile_and_load_their_scalars(
    entry: str, particles: ModuleType
) -> None:
    kernel = kernels.from_cuda(particles.SOURCE, entry, cache=False)
    assert kernel.parameters is not None
    hot = {
        number: Loaded(parameter.type)
        for number, parameter in enumerate(kernel.parameters)
        if not parameter.takes_pointer() and parameter.name != "capacity"
    }
    assert len(hot) == {"emit": 5, "integrate": 2}.get(entry, 3)
    text = kernel.image_with(hot).decode()
    assert all(f"%kvblock_at{number}," in text for number in hot)


def test_an_animation_is_lowered_for_a_gpu(particles: ModuleType) -> None:
    """As four kernels, the last three of which update what they are given."""
    operands = (np.zeros(8, np.float32), jnp.float32(1), jnp.int32(1))
    traced = particles.animate.trace(particles.particle_system(), *operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@kvblock_kernel_call(" in line]
    assert len(calls) == 4
    aliased = ["output_operand_alias<" in line for line in calls]
    assert aliased == [False, True, True, True]


# ---- the example's own checks --------------------------------------------------------


def test_the_examples_checks_hold(
    where: str, particles: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole example, with fewer particles."""
    for name, less in (("CAPACITY", 512), ("RATE", 4), ("FRAMES", 110)):
        monkeypatch.setattr(particles, name, less)
    graph = particles.particle_system(512)
    pulls = np.linspace(9, -9, 110, dtype=np.float32)
    last = particles.check_animation(graph, pulls)
    assert len(last) == 4 * 96
    particles.check_engine(graph, pulls, last)
