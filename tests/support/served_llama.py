"""Fixtures of the server's tests; who does not ask for them imports nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import pytest

if TYPE_CHECKING:
    from llama_engines import Greedy
    from llama_files import TinyModel
    from serve.models import LoadedModel


@pytest.fixture(scope="session")
def kept_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of the same shapes compile once: programs are kept on disk."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def tiny(
    tmp_path_factory: pytest.TempPathFactory, kept_programs: None
) -> tuple[TinyModel, LoadedModel]:
    """A tiny model, and the same as the examples load it."""
    from llama_files import TinyModel
    from serve.models import load_model

    drawn = TinyModel.draw("llama3")
    return drawn, load_model(drawn.write_folder(tmp_path_factory.mktemp("m") / "tiny"))


@pytest.fixture(scope="session")
def greedy(tiny: tuple[TinyModel, LoadedModel]) -> Greedy:
    """What the tiny model says, each text computed once for all tests."""
    from llama_engines import Greedy

    return Greedy(tiny[0])


@pytest.fixture
def lowered() -> Iterator[list[str]]:
    """A list that grows whenever jax makes a program, also one that is kept on disk."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event.endswith("jaxpr_to_mlir_module_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
