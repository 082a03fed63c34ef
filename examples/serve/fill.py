"""A plan as a batch: which rows, which slots, which keys each row sees."""

import numpy as np

from jax_kvblock.cache import prepare_step
from serve.batch import Batch
from serve.scheduler import Part
from serve.sequences import Sequence


def fill(batch: Batch, parts: list[Part]) -> list[tuple[Part, int]]:
    """Put the parts' rows into a batch.

    Returns:
        Each part behind which a new token is wanted, and its first output: that of its
        last token, followed by its drafts'.
    """
    wanted: list[tuple[Part, int]] = []
    num_rows = sum(part.num_rows for part in parts)
    _place(batch, parts, num_rows)
    # In lists, of which arrays are filled once: a step has many parts of a row.
    tokens: list[int] = []
    positions: list[int] = []
    feed: list[int] = []
    outputs: list[int] = []
    for part in parts:
        sequence, start, count = part.sequence, part.start, part.num_tokens
        known = sequence.tokens[start : start + count]
        tokens += known
        feed += [-1] * count
        if len(known) < count:  # drawn by the last step, and not read
            tokens.append(0)
            feed[-1] = sequence.row
        positions += range(start, start + count)
        last = len(tokens) - 1
        if part.draft is not None:
            tokens += part.draft.tokens
            feed += [-1] * len(part.draft)
            positions += [positions[-1] + depth for depth in part.draft.depths[1:]]
        if part.last:
            wanted.append((part, len(outputs)))
            own = slice(len(outputs), len(outputs) + len(tokens) - last)
            outputs += range(last, len(tokens))
            _sampling(batch, own, sequence, part)
            if part.draft is not None:
                _drafts(batch, last, own.start, part)
    batch.tokens[:num_rows] = tokens
    batch.positions[:num_rows] = positions
    batch.feed[:num_rows] = feed
    batch.outputs[: len(outputs)] = outputs
    return wanted


def _place(batch: Batch, parts: list[Part], num_rows: int) -> None:
    """Where keys and values of the rows go, and which keys they see."""
    places = len(parts)
    counts = [part.num_rows + part.steps - 1 for part in parts]
    slots, batch.tables[:places], kv_lens, starts = prepare_step(
        [part.sequence.table for part in parts],
        counts,
        starts=[part.start for part in parts],
        max_blocks=batch.shape.width,
    )
    batch.query_start.fill(num_rows)
    if batch.shape.steps == 1:
        batch.slots[:num_rows] = slots
        batch.kv_lens[:places] = kv_lens
        batch.query_start[: places + 1] = starts
        return
    # A row for each in all steps; -1 behind those of which a step wants no token.
    batch.query_start[: places + 1] = range(places + 1)
    batch.kv_lens[:places] = kv_lens - counts
    place = np.repeat(np.arange(places), counts)
    batch.slots[np.arange(len(slots)) - starts[place], place] = slots


def _sampling(batch: Batch, outputs: slice, sequence: Sequence, part: Part) -> None:
    request = sequence.request
    if request.temperature == 0:
        return
    batch.temperature[outputs] = request.temperature
    batch.top_k[outputs] = min(request.top_k, 2**31 - 1)
    batch.top_p[outputs] = request.top_p
    seed = np.array([request.seed % 2**64], np.uint64)
    batch.seed[outputs] = seed.view(np.int32)
    depths = part.draft.depths if part.draft is not None else [0]
    batch.place[outputs] = np.array(depths) + part.start + part.num_tokens


def _drafts(batch: Batch, last: int, output: int, part: Part) -> None:
    """Rows that guess: each sees its own ancestors, and is as far on as they say."""
    draft, size = part.draft, len(part.draft)
    rows, outputs = slice(last, last + 1 + size), slice(output + 1, output + 1 + size)
    masks = np.array(draft.masks, np.uint32)
    batch.tree_mask[rows, 0] = masks.view(np.int32)
    batch.parents[outputs] = output + np.array(draft.parents)
    homes = batch.slots[last + np.array(draft.depths[1:])]
    own = batch.slots[last + 1 : rows.stop]
    batch.homes[outputs] = np.where(homes == own, -1, homes)
