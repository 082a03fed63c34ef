"""Four CPU devices for sharding tests, and a run that says what it left out."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from typing import Any

# Before jax starts: sharding tests need several devices, and a GPU run should not take
# all of its memory at once. What is compiled here runs once.
_FLAGS = [
    "--xla_force_host_platform_device_count=4",
    # To time candidates for each product of a GPU takes thirty times as long as to
    # compile the program.
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_enable_triton_gemm=false",
    # In as many threads as there are cores, each process of the suite would have a
    # GPU's program compiled in parts and linked; with ptxas' and LLVM's optimizations,
    # a sixth more of a processor in all.
    "--xla_gpu_force_compilation_parallelism=1",
    "--xla_gpu_disable_gpuasm_optimizations=true",
    "--xla_llvm_disable_expensive_passes=true",
    # Half the time of LLVM for a CPU.
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    # A quarter of the rest: no MLIR emitters of fused loops.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true",
]
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_FLAGS)).strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# NumPy's products: the suite has a process for each core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gpus

gpus.rotate(os.environ.get("PYTEST_XDIST_WORKER", ""))

import browser
import jax
import numpy as np
import places
import pytest

import jax_kvblock
from jax_kvblock.core import checks

pytest_plugins = [
    "budgets",
    "case_limit",
    "dealing",
    "emulated_append",
    "emulated_attention",
    "emulated_cast",
    "emulated_kernels",
    "emulated_quantize",
    "emulated_select",
    "emulated_streams",
    "paged_model",
    "record",
    "run_examples",
    "served_llama",
]


def has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


# First of all, so that `-m` knows what is marked here.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places.mark(items)
    needs = {
        "gpu": (has_gpu(), "no NVIDIA GPU here"),
        "cpu": (not has_gpu(), "runs on CPUs alone, as in CI"),
        "torch": (has_torch(), "PyTorch is not installed"),
    }
    for item in items:
        for marker, (present, reason) in needs.items():
            if not present and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    if has_gpu():
        reason = "runs on CPUs, as in CI: beside a GPU, a test's first case alone"
        for item in places.others_than_the_first(items):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    # CI sets this, so that a missing torch fails instead of skipping.
    if os.environ.get("KVBLOCK_REQUIRE_TORCH") and not has_torch():
        raise pytest.UsageError("KVBLOCK_REQUIRE_TORCH is set, but torch is missing")
    if os.environ.get("KVBLOCK_REQUIRE_BROWSER") and not browser.has_browser():
        raise pytest.UsageError(
            "KVBLOCK_REQUIRE_BROWSER is set, but PyQt6-WebEngine is missing"
        )
    if os.environ.get("KVBLOCK_REQUIRE_GPU") and not has_gpu():
        raise pytest.UsageError("KVBLOCK_REQUIRE_GPU is set, but jax sees no GPU")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    where = "on a GPU" if has_gpu() else "on the CPU"
    terminalreporter.write_line(
        f"jax_kvblock {jax_kvblock.__version__}, jax {jax.__version__}, {where}; "
        f"{len(skipped)} tests did not run"
    )
    if not has_gpu():
        terminalreporter.write_line(
            "The CUDA kernels were not tested: run `make gpu-test` on a machine with a "
            "GPU."
        )


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that differ from test to test and repeat from run to run."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def _no_callback_failed() -> Iterator[None]:
    """JAX remembers the last callback of each device, also one that failed, and tells
    whoever waits for callbacks next. That would be another test of this process."""
    yield
    try:
        jax.effects_barrier()
    except Exception:
        _forget()  # this test fails, and none behind it
        raise


@pytest.fixture
def forgotten() -> Iterator[None]:
    """For tests whose callbacks fail: another one follows on each device."""
    yield
    _forget()


def _forget() -> None:
    for device in {*jax.devices(), *jax.devices("cpu")}:
        _call_back(jax.device_put(0, device))
    jax.effects_barrier()


@jax.jit
def _call_back(x: jax.Array) -> None:
    jax.debug.callback(lambda _: None, x)


@pytest.fixture
def four_cpus() -> Iterator[None]:
    """Tests of several devices, and of the CPU's own ways, run on CPUs everywhere."""
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.fail("XLA_FLAGS must force four CPU devices")
    with jax.default_device(devices[0]):
        yield


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Products of float32 are of float32 everywhere: on a GPU they would be of TF32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[jax.Array]:
    """As on a GPU's machine: what goes to the default device is unknown to the host.

    Gives what has gone there.
    """
    put, known = jax.device_put, checks.known_values
    gone: list[jax.Array] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        gone.append(put(*args, **kwargs))
        return gone[-1]

    def unless_gone(x: Any) -> np.ndarray | None:
        return None if any(x is array for array in gone) else known(x)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_put", recorded)
    monkeypatch.setattr(checks, "known_values", unless_gone)
    return gone


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """A list that grows by one whenever jax compiles."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Python changes threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
