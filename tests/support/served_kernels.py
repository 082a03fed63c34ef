"""Which kernels of attention the GPU of a test has."""

from __future__ import annotations

import pytest

from jax_kvblock.attention.cuda import unserved_by_gpu


def skip_unless_served(implementation: str, *, backward: bool) -> None:
    """Skips a test of kernels that the GPU has not, and says what they do not serve.

    Args:
      implementation: theirs, "cuda" or "cuda_sm90".
      backward: whether the test takes gradients, too.
    """
    if missing := unserved_by_gpu(implementation, backward=backward):
        pytest.skip(f"{implementation} does not serve {missing[0]}")
