"""Waits for what other threads and devices do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(true: Callable[[], Any], seconds: float = 30.0) -> None:
    """Waits for a condition, and fails when it does not come."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{true} is not so after {seconds} seconds"
        time.sleep(0.005)
