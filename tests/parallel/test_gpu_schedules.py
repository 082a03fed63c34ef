"""What travels goes under what is computed: the programs that NVIDIA GPUs would run.

And how much memory they take. They are compiled for GPUs by a CUDA plugin of JAX, where
no GPU is.
"""

from __future__ import annotations

import functools
import re

import gpu_schedules
import pytest
from cuda_plugin import needs_plugin, run

FORWARD, BACKWARD = "attention_forward", "attention_backward_kv"


@functools.cache
def compiled(strategy: str, count: int, length: int, work: str, how: str) -> str:
    words = strategy, str(count), str(length), work, how
    return run(gpu_schedules.__file__, *words)


def schedule(*words: str | int) -> tuple[str, ...]:
    return tuple(compiled(*words).partition("schedule:\n")[2].split("\n")[:-1])


def shards(*words: str | int) -> float:
    """What a GPU holds, in keys and values of its own rows."""
    (found,) = re.findall(r"^bytes: (\d+)$", compiled(*words), re.M)
    _, count, length, *_ = words
    return int(found) / (2 * 2 * 8 * 128 * length // count)


def exposed(lines: tuple[str, ...], most: int = 1) -> list[str]:
    """Collectives that no kernel of attention runs beside; `most` at a time."""
    found, beside, begun = [], False, 0
    for line in lines:
        if line.endswith(" at-once"):
            found.append(line)
        elif line.endswith(" start"):
            beside, begun = False, begun + 1
            assert begun <= most, f"{begun} at once"
        elif line.endswith(" done"):
            begun -= 1
            if not beside:
                found.append(line)
        elif line in (FORWARD, BACKWARD):
            beside = True
    return found


def test_what_is_exposed_is_found():
    hidden = ("x start", FORWARD, "x done")
    assert exposed(hidden) == []
    assert exposed(("x at-once", FORWARD)) == ["x at-once"]
    assert exposed((FORWARD, "x start", "after", "x done", BACKWARD)) == ["x done"]
    two = ("x start", "y start", FORWARD, "y done", "x done")
    with pytest.raises(AssertionError, match="2 at once"):
        exposed(two)
    assert exposed(two, 2) == []
    late = ("x start", FORWARD, "y start", "x done", "y done")
    assert exposed(late, 2) == ["x done", "y done"]  # of both, or of neither


@needs_plugin
@pytest.mark.parametrize("how", ["plain", "tuned"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_ring(count, how):
    """Every shard, and every gradient, in one collective under a kernel each.

    As jit is, four devices have one shard and one sum that are to go at the same time.
    XLA hides but one of them.
    """
    forward = schedule("ring", count, 16384, "forward", how)
    sends = [line for line in forward if line.startswith("collective-permute")]
    assert len(sends) == 2 * (count - 1) and exposed(forward) == []
    assert forward.count(FORWARD) == count and "copy" not in forward
    assert forward.count("join") == (how == "plain")  # of a device's own keys
    both = schedule("ring", count, 16384, "both", how)
    assert both.count(FORWARD) == both.count(BACKWARD) == count
    # Of a shard that both passes send on, alone; calls add to out, lse and dq in place.
    assert both.count("copy") <= (count > 2) * (2 if how == "tuned" else 1)
    extra = 0 if how == "tuned" else max(0, count - 3)
    assert len(exposed(both)) == extra
    sends = [line for line in both if line.endswith("permute start")]
    # A shard goes round twice, but comes once where the backward pass begins with it;
    # gradients go with the next shard, and home.
    assert len(sends) == 3 * (count - 1) - 1 - (count > 2) + extra


@needs_plugin
def test_keys_that_are_gathered():
    """Own keys come first forward, under what arrives, and last backward."""
    both = schedule("all_gather", 4, 32768, "both", "without engines")
    assert exposed(both) == []
    assert both[0] == "all-gather start" and both[-1] == "reduce-scatter done"
    assert both.count(FORWARD) == both.count(BACKWARD) == 2


@needs_plugin
@pytest.mark.parametrize("count", [2, 4, 8])
def test_keys_that_are_sent_to_all(count):
    """By copy engines, all at once, under own keys; gradients go home so, too."""
    both = schedule("all_gather", count, 32768, "both", "tuned")
    assert exposed(both, count - 1) == []
    begun, done = (["collective-permute " + x] * (count - 1) for x in ("start", "done"))
    there = [*begun, FORWARD, *done, FORWARD]
    back = [BACKWARD, *begun, BACKWARD, *done]
    steps = [line for line in both if line not in ("after", "copy")]
    assert steps == there + back
    # Of four bytes a row, which say which row of which device one is.
    assert both.count("copy") <= 1


@needs_plugin
def test_heads_for_rows():
    """Nothing hides, and nothing else travels."""
    forward = schedule("ulysses", 4, 32768, "forward", "tuned")
    moved = {line.split()[0] for line in forward if " " in line}
    assert moved == {"all-to-all"} and forward.count(FORWARD) == 1


@needs_plugin
def test_the_memory_of_a_ring():
    """Beside what goes in and comes out, two shards, on any number of GPUs.

    These are five, since q and out are as large as two each, and ten with gradients.
    Beside these and two shards, a ring's gradients take less than as much again.
    """
    lse = 1 / 32
    for count, others in ((2, 1), (4, 2), (8, 2)):
        found = shards("ring", count, 16384, "forward", "tuned")
        assert found <= 5 + others + 2 * lse
    assert shards("all_gather", 8, 16384, "forward", "tuned") >= 5 + 8
    assert shards("ring", 8, 32768, "both", "tuned") <= 1.75 * 12
    # Sums of dq are of a quarter of the heads from 16,384 rows on, and dk travels once.
    for length in (32768, 131072):
        assert shards("ring", 2, length, "both", "tuned") <= 1.10 * 12
    assert shards("all_gather", 8, 32768, "both", "tuned") >= 1.75 * 12 + 8
