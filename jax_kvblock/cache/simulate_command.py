"""`python -m jax_kvblock simulate`: hit rates of traces by capacity and policy."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from jax_kvblock.cache.simulate import Policy, SimulationResult, simulate
from jax_kvblock.cache.trace import Request, read_trace

POLICIES: tuple[Policy, ...] = ("lru", "lfu")
UNBOUNDED = "unbounded"


def main(arguments: Sequence[str]) -> None:
    """Prints a table for each trace; writes all results as JSON if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_kvblock simulate", description=__doc__
    )
    parser.add_argument(
        "traces",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help="lines of JSON",
    )
    parser.add_argument(
        "--capacity",
        type=_capacities,
        metavar="N[,N…]",
        help=f"blocks of the pool, or '{UNBOUNDED}'; by default from 1/64 of the "
        "blocks that differ up to all of them",
    )
    parser.add_argument(
        "--policy",
        type=_policies,
        default=POLICIES,
        metavar="P[,P…]",
        help="'lru' or 'lfu'; both by default",
    )
    parser.add_argument(
        "--seconds-per-token",
        type=float,
        metavar="S",
        help="requests hold their blocks for as long, times the tokens they write; "
        "by default they come one after the other",
    )
    parser.add_argument("--json", type=Path, help="write the results there, too")
    options = parser.parse_args(arguments)
    written = {}
    for path in options.traces:
        try:
            trace = read_trace(path)
            results = sweep(
                trace, options.capacity, options.policy, options.seconds_per_token
            )
        except (OSError, ValueError) as error:
            parser.error(str(error))
        print(f"{path.name}\n{table(results)}\n", flush=True)
        written[path.name] = [dataclasses.asdict(result) for result in results]
    if options.json is not None:
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def sweep(
    trace: Sequence[Request],
    capacities: Iterable[int | None] | None = None,
    policies: Iterable[Policy] = POLICIES,
    seconds_per_token: float | None = None,
) -> list[SimulationResult]:
    """Results for each capacity and each policy, in this order.

    Args:
      trace: requests in the order of their arrival.
      capacities: in blocks, None for a pool without bound; by default 1/64, 1/32, … of
        the blocks that differ, and no bound.
      policies, seconds_per_token: see `simulate`.
    """
    if capacities is None:
        differ = simulate(trace).num_stored
        steps = {max(differ >> shift, 1) for shift in range(6, 0, -1)}
        capacities = [*sorted(steps), None]
    return [
        simulate(
            trace,
            capacity=capacity,
            policy=policy,
            seconds_per_token=seconds_per_token,
        )
        for capacity in capacities
        for policy in policies
    ]


def table(results: Sequence[SimulationResult]) -> str:
    """Hit rates in lines by capacity and columns by policy."""
    policies = list(dict.fromkeys(result.policy for result in results))
    rows: dict[int | None, dict[str, SimulationResult]] = {}
    for result in results:
        rows.setdefault(result.capacity, {})[result.policy] = result
    first = results[0]
    lines = [
        f"{first.num_requests:,} requests, {first.num_blocks:,} blocks",
        f"{'capacity (blocks)':>17}  " + "  ".join(f"{p:>7}" for p in policies),
    ]
    for capacity, found in rows.items():
        told = UNBOUNDED if capacity is None else f"{capacity:,}"
        shares = "  ".join(f"{found[p].hit_rate:7.2%}" for p in policies)
        lines.append(f"{told:>17}  {shares}{_notes(found.values())}")
    return "\n".join(lines)


def _notes(found: Iterable[SimulationResult]) -> str:
    """What a hit rate alone would hide."""
    refused = max(result.num_refused for result in found)
    waited = max(result.num_waited for result in found)
    notes = f"  {refused:,} refused" if refused else ""
    return notes + (f"  {waited:,} waited" if waited else "")


def _capacities(text: str) -> list[int | None]:
    return [None if word == UNBOUNDED else int(word) for word in text.split(",")]


def _policies(text: str) -> list[str]:
    words = text.split(",")
    for word in words:
        if word not in POLICIES:
            raise argparse.ArgumentTypeError(f"'{word}' is none of {POLICIES}")
    return words
