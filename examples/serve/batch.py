"""What a step is given: one buffer of integers, whose parts have names.

One array goes to the device for a step, not twenty. Its shape says which program
computes it: a few numbers of rows are enough for all steps.
"""

from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from serve.llama import Rows
from serve.sampling import Sampling

# What parts hold where nothing is put: no slot, no block, no row.
NOTHING = ("slots", "tables", "tree_mask", "feed", "parents", "homes")


@dataclass(frozen=True)
class Shape:
    """The shape of a step.

    Attributes:
        rows: tokens that are computed.
        places: sequences.
        width: blocks of a sequence, at most.
        drafts: behind a sequence's newest token, at most.
        greedy: whether every output is the likeliest token. None: the device looks.
            On a GPU that would stop the host in each step, so there are programs for
            both.
        steps: of decoding, one after the other, in one program: a token of each
            sequence, and the next ones of those that the step before has drawn.
    """

    rows: int
    places: int
    width: int
    drafts: int
    greedy: bool | None = None
    steps: int = 1

    @property
    def most_outputs(self) -> int:
        """Rows whose next token is wanted, in the largest step."""
        return self.places * (1 + self.drafts)

    @property
    def outputs(self) -> int:
        """The same, in this one."""
        return min(self.rows, self.most_outputs)

    @cached_property
    def parts(self) -> dict[str, tuple[slice, tuple[int, ...], str]]:
        """Where each part lies in the buffer, its shape and dtype."""
        rows, outputs, places = self.rows, self.outputs, self.places
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (rows,),
            "positions": (rows,),
            "slots": (rows,) if self.steps == 1 else (self.steps, rows),
            "feed": (rows,),
            "tables": (places, self.width),
            "kv_lens": (places,),
            "query_start": (places + 1,),
            "outputs": (outputs,),
            "temperature": (outputs,),
            "top_k": (outputs,),
            "top_p": (outputs,),
            "seed": (outputs, 2),
            "place": (outputs,),
        }
        if self.drafts:
            shapes |= {"tree_mask": (rows, 1)}
            shapes |= {"parents": (outputs,), "homes": (outputs,)}
        parts, start = {}, 0
        for name, shape in shapes.items():
            end = start + int(np.prod(shape))
            dtype = "float32" if name in ("temperature", "top_p") else "int32"
            parts[name] = slice(start, end), shape, dtype
            start = end
        return parts

    @property
    def size(self) -> int:
        """Integers of the buffer."""
        return max(place.stop for place, *_ in self.parts.values())


class Batch:
    """A step's buffer, to be filled.

    Attributes (int32 unless said otherwise; those of `Rows` and `Sampling`, and):
        buffer: all of it.
        slots: [rows], or [steps, rows] where a program has several steps; then kv_lens
            are the keys that were there before the first one.
        feed: [rows], the last step's output whose token this row takes; -1: `tokens`.
        outputs: [n], the rows whose next token is wanted.
        parents: [n], of an output that is a draft, its parent's output; else -1.
        homes: [n], of a draft, the slot where it belongs if it is accepted and its own
            is another one; else -1.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.buffer = np.zeros(shape.size, np.int32)
        for name, (place, extents, dtype) in shape.parts.items():
            part = self.buffer[place].view(dtype).reshape(extents)
            if name in NOTHING:
                part.fill(-1)
            setattr(self, name, part)
        self.top_p.fill(1)


def unpack(buffer: jax.Array, shape: Shape) -> dict[str, jax.Array]:
    """The parts of a buffer, on the device."""

    def part(place: slice, extents: tuple[int, ...], dtype: str) -> jax.Array:
        found = buffer[place].reshape(extents)
        if dtype == "int32":
            return found
        return jax.lax.bitcast_convert_type(found, np.dtype(dtype))

    return {name: part(*about) for name, about in shape.parts.items()}


def rows_of(parts: dict[str, jax.Array], tokens: jax.Array) -> Rows:
    """What the model is given; the tokens may be those of the last step."""
    given = {name: parts.get(name) for name in Rows._fields}
    return Rows(**(given | {"tokens": tokens}))


def sampling_of(parts: dict[str, jax.Array]) -> Sampling:
    """How the outputs draw."""
    return Sampling(**{name: parts[name] for name in Sampling._fields})
