"""`python -m jax_kvblock` tells the truth about this install."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import jax
import pytest

from jax_kvblock import _ffi, _report


def test_report_names_versions_build_devices_and_every_op() -> None:
    text = _report.report()
    assert f"jax {jax.__version__}" in text
    assert f"jaxlib {metadata.version('jaxlib')}" in text
    assert str(jax.devices()[0]) in text
    for op in (*_report.COPY_OPS, _report.OPERATIONAL_OPS):
        for name in op.split(" / "):
            assert name in text


def test_module_runs_from_anywhere(tmp_path: object) -> None:
    import pathlib

    import jax_kvblock

    root = pathlib.Path(jax_kvblock.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "jax_kvblock"],
        cwd=root if (root / "pyproject.toml").exists() else str(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ops on the default device" in done.stdout


def test_the_reported_implementation_is_the_one_that_runs() -> None:
    """The report says "kernel" exactly when the compiled program calls it."""
    import jax.numpy as jnp

    from jax_kvblock import block_to_universal

    compiled = jax.jit(block_to_universal).lower(jnp.zeros((2, 2, 2, 4, 2, 8)))
    calls_kernel = "kvblock_copy" in compiled.compile().as_text()
    served = _report.capabilities()[0].implementation
    assert calls_kernel == served.startswith("kernel")


def test_the_reported_attention_is_the_one_that_runs() -> None:
    """The report says "cuda" exactly when the compiled program calls the kernels."""
    import jax.numpy as jnp

    from jax_kvblock import flash_attention

    rows = {row.op: row for row in _report.capabilities()}
    for dtype, op in (
        (jnp.bfloat16, _report.ATTENTION_16_BITS),
        (jnp.float32, _report.ATTENTION_32_BITS),
    ):
        x = jnp.zeros((1, 16, 1, 16), dtype)
        text = jax.jit(flash_attention).lower(x, x, x).compile().as_text()
        calls_kernel = "kvblock_attention_forward" in text
        assert calls_kernel == rows[op].implementation.startswith("cuda")
        assert rows[op].why


def test_the_report_lists_the_tiles_and_cudnn() -> None:
    from jax_kvblock.attention import cuda

    text = _report.report()
    for kernels in ("cuda", *cuda.best_kernels()):
        for queries, keys in cuda.FORWARD_TILES[kernels].values():
            assert f"({keys}, {queries}) for" in text
    assert ("(176, 128)" in text) == ("cuda_sm90" in cuda.best_kernels())
    assert "16, 32, 64, 128, 256, 512" in text
    assert _report.ATTENTION_CUDNN in text


def test_a_gpu_without_a_cuda_build_says_how_to_rebuild(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(_ffi.BUILD, "cuda", False)
    monkeypatch.setattr(_ffi, "gpu_present", lambda: True)
    with pytest.raises(RuntimeError, match=r"(?s)GPU is present.*nvcc.*pip install"):
        _ffi.require_cuda_build()


def test_exporting_for_cuda_from_a_machine_without_a_gpu_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jax.numpy as jnp

    from jax_kvblock import block_to_universal

    monkeypatch.setitem(_ffi.BUILD, "cuda", False)
    monkeypatch.setattr(_ffi, "gpu_present", lambda: False)
    check = jax.export.DisabledSafetyCheck.custom_call("kvblock_copy")
    exported = jax.export.export(
        jax.jit(block_to_universal), platforms=("cuda",), disabled_checks=[check]
    )(jnp.zeros((1, 2, 4, 2, 8)))
    assert "kvblock_copy" in exported.mlir_module()
