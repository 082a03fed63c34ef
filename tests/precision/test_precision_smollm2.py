"""S2's module of few bits around a real model, SmolLM2-135M, that reads real text."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from run_benchmarks import imported
from smollm2_here import skip_without_model

from jax_kvblock.precision import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    create_ultra_precision_module,
)

FORMATS = tuple(PrecisionFormat[f"INT{bits}"] for bits in (2, 3, 4, 5))


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/precision_quality.py, which has the model as a function."""
    yield from imported("precision_quality", monkeypatch)


@pytest.mark.cpu
@pytest.mark.slow
def test_a_real_model_in_a_quarter_of_its_bytes(quality: Any) -> None:
    """Bits by what gradients say lose less than as many for all, and are stored so."""
    skip_without_model()
    model = quality.reading.smollm2(None)
    learned, judged = (
        quality.windows(model, name, 1, 129)[0]
        for name in ("reference 0", "typing ast")
    )
    loss = functools.partial(quality.next_token_loss, model.config)
    nats = jax.jit(loss)
    excess = {}
    for strategy in (AllocationStrategy.UNIFORM, AllocationStrategy.GRADIENT_WEIGHTED):
        data = {"loss": loss, "batches": [learned]}
        module = create_ultra_precision_module(
            (functools.partial(quality.scores, model.config), model.params),
            PrecisionConfig(
                allocation_strategy=strategy,
                target_memory_reduction=0.75,
                formats=FORMATS,
                group_size=64,
            ),
            parts={"embedding": 16},
            **(data if strategy is AllocationStrategy.GRADIENT_WEIGHTED else {}),
        )
        stats = module.get_precision_stats()
        stored = sum(leaf.nbytes for leaf in jax.tree.leaves(module.params))
        count = sum(np.size(leaf) for leaf in jax.tree.leaves(model.params))
        assert stats.stored_bytes == stored <= count / 2  # of two bytes each
        assert stats.memory_savings_ratio >= 0.75
        excess[strategy] = float(nats(module.dequantized(), judged)) - float(
            nats(model.params, judged)
        )
    uniform, weighted = excess.values()
    assert 0 < weighted < 0.4 * uniform
