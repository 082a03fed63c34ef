"""Recorded requests, as Mooncake publishes them: times, lengths, and names of blocks.

A file has a line of JSON for each request:

    {"timestamp": 27482, "input_length": 955, "output_length": 52, "hash_ids": [4, 7]}

`hash_ids` name the blocks of the input in order. A name stands for the block's tokens
and all tokens before it, so two requests with the same first names share that prefix.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import numpy as np
import numpy.typing as npt

_NUMBERS = ("timestamp", "input_length", "output_length")


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One request of a trace.

    Attributes:
      blocks: int32, the blocks of its input in order, by number; the same number is the
        same block.
      arrival: seconds since the trace began.
      input_length, output_length: in tokens.
    """

    blocks: npt.NDArray[np.int32]
    arrival: float = 0.0
    input_length: int = 0
    output_length: int = 0


def read_trace(path: str | os.PathLike[str]) -> list[Request]:
    """The requests of a file, in the order of their arrival.

    Args:
      path: lines of JSON with `timestamp` (milliseconds), `input_length`,
        `output_length` (tokens) and `hash_ids` (a list of numbers or strings).

    Raises:
      ValueError: a line is no such request; the message has its number.

    Example:
      >>> trace = read_trace("conversation_trace.jsonl")
    """
    numbers: dict[object, int] = {}
    trace = []
    with open(path, encoding="utf-8") as lines:
        for at, line in enumerate(lines, 1):
            if line.strip():
                try:
                    trace.append(_request(json.loads(line), numbers))
                except (ValueError, TypeError, KeyError) as error:
                    raise ValueError(
                        f"read_trace: {path}:{at} is no request ({error!r}); a line "
                        'is {"timestamp": ms, "input_length": tokens, '
                        '"output_length": tokens, "hash_ids": [block, …]}'
                    ) from error
    return sorted(trace, key=lambda request: request.arrival)


def _request(line: dict[str, Any], numbers: dict[object, int]) -> Request:
    told = [line[name] for name in _NUMBERS]
    if not all(type(value) in (int, float) and value >= 0 for value in told):
        raise ValueError(f"{', '.join(_NUMBERS)} must be numbers of at least 0")
    if not isinstance(line["hash_ids"], list):
        raise TypeError("hash_ids must be a list")
    milliseconds, read, written = told
    blocks = [numbers.setdefault(name, len(numbers)) for name in line["hash_ids"]]
    return Request(
        np.array(blocks, np.int32), milliseconds / 1000, int(read), int(written)
    )
