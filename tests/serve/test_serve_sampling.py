"""What is drawn: by the right chances, among the right tokens, whatever the batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_engines import Guesses, ask, tokens_of
from llama_files import TinyModel
from serve import engine as engine_module
from serve.engine import Engine
from serve.models import LoadedModel
from serve.sampling import Sampling, draw

pytestmark = pytest.mark.usefixtures("exact_products")
draw = jax.jit(draw)


def how(
    n: int, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, seed: Any = 0
) -> Sampling:
    """Of n rows: the n first places of a text."""

    def row(x: Any, dtype: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(x, dtype), (n,))

    return Sampling(
        row(temperature, jnp.float32),
        row(top_k, jnp.int32),
        row(top_p, jnp.float32),
        jnp.stack([row(seed, jnp.int32)] * 2, axis=-1),
        jnp.arange(n, dtype=jnp.int32),
    )


def test_draws_have_the_chances_of_the_logits(rng: np.random.Generator) -> None:
    n, logits = 20_000, rng.standard_normal(12).astype(np.float32) * 2
    for temperature in (0.5, 2.0):
        drawn = np.asarray(draw(np.tile(logits, (n, 1)), how(n, temperature)))
        chances = np.exp(logits.astype(np.float64) / temperature)
        wanted = n * chances / chances.sum()
        found = np.bincount(drawn, minlength=12)
        rare = wanted < 5
        found, wanted = (np.append(x[~rare], x[rare].sum()) for x in (found, wanted))
        chi_square = ((found - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
        assert chi_square < 45  # 12 degrees of freedom: one in 10^5 is above


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (7, 1.0), (0, 0.3), (0, 0.9), (5, 0.6), (99, 1e-6)]
)
def test_draws_are_among_the_likeliest(
    top_k: int, top_p: float, rng: np.random.Generator
) -> None:
    """By a sort: the top k, then of these the fewest that have the probability p."""
    n, size = 4_000, 50
    logits = rng.standard_normal(size).astype(np.float32)
    drawn = np.asarray(draw(np.tile(logits, (n, 1)), how(n, 1.0, top_k, top_p)))
    order = np.argsort(-logits)[: top_k or size]
    chances = np.exp(logits[order].astype(np.float64))
    before = (chances / chances.sum()).cumsum() - chances / chances.sum()
    allowed = order[before < top_p]
    likely = order[: len(allowed)][chances[: len(allowed)] / chances.sum() > 0.005]
    assert set(likely) <= set(drawn) <= set(allowed)


def test_rows_draw_each_in_its_own_way(rng: np.random.Generator) -> None:
    logits = rng.standard_normal((6, 40)).astype(np.float32)
    ways = how(6, [0, 1, 0, 2, 1, 1], [0, 0, 3, 4, 0, 1], [1, 1, 0.5, 1, 0.4, 1])
    drawn = np.asarray(draw(logits, ways))
    likeliest = logits.argmax(-1)
    assert drawn[[0, 2, 5]].tolist() == likeliest[[0, 2, 5]].tolist()
    for i in range(6):
        one = Sampling(*(x[i : i + 1] for x in ways))
        assert np.asarray(draw(logits[i : i + 1], one)) == drawn[i]


@pytest.mark.parametrize("least", [1e-30, 1e-38, 1e-42, 5e-324])
def test_numbers_too_small_for_float32_take_the_likeliest(least: float) -> None:
    logits = np.tile(np.float32([3, 10, -5, 30, 20]), (4, 1))
    for ways in (how(4, least), how(4, 1.0, 0, least), how(4, least, 3, least)):
        assert np.asarray(draw(logits, ways)).tolist() == [3] * 4


def test_seeds_and_places_change_what_is_drawn() -> None:
    flat = np.zeros((64, 1000), np.float32)
    draws = [np.asarray(draw(flat, how(64, seed=seed))) for seed in (0, 0, 1)]
    assert (draws[0] == draws[1]).all()
    assert (draws[0] != draws[2]).mean() > 0.9
    assert len(np.unique(draws[0])) > 50


WAYS = {
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
}


def test_a_request_draws_the_same_in_any_company(
    tiny: tuple[TinyModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone; in a batch; put back and resumed; with drafts of which some are right."""
    random = np.random.default_rng(8)
    prompts = [random.integers(256, size=n).tolist() for n in (3, 40, 17, 25)]
    seeds = (1, 2**40 + 5, -7, 2**64 - 1)

    def run(together: bool, **given: Any) -> tuple[list[list[int]], Engine]:
        engine = Engine(tiny[1], block_size=8, max_tokens=96, **given)
        streams = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            streams.append(ask(engine, prompt, 24, seed=seed, **WAYS))
            if not together:
                engine.run()
        engine.run()
        engine.stop()
        return [tokens_of(stream) for stream in streams], engine

    alone, _ = run(False, num_blocks=64)
    assert len({tuple(tokens) for tokens in alone}) == 4
    together, _ = run(True, num_blocks=64)
    assert together == alone
    several, engine = run(True, num_blocks=64, decode_steps=5)
    assert several == alone
    small, engine = run(True, num_blocks=12, host_bytes=1 << 20, max_tokens_per_step=16)
    assert small == alone and engine.stats()["preemptions"] > 0
    texts = [[*p, *t] for p, t in zip(prompts, alone, strict=True)]
    monkeypatch.setattr(engine_module, "PromptLookup", Guesses(texts))
    drafted, engine = run(True, num_blocks=64, draft_tokens=5)
    assert drafted == alone and engine.stats()["accepted_tokens"] > 20
    assert engine.stats()["steps"] < 24
