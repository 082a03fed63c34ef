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
    row = output = 0
    places, rows = len(parts), sum(part.num_rows for part in parts)
    batch.query_start.fill(rows)
    (
        batch.slots[:rows],
        batch.tables[:places],
        batch.kv_lens[:places],
        batch.query_start[: places + 1],
    ) = prepare_step(
        [part.sequence.table for part in parts],
        [part.num_rows for part in parts],
        starts=[part.start for part in parts],
        max_blocks=batch.shape.width,
    )
    for part in parts:
        sequence, start, count = part.sequence, part.start, part.num_rows
        end = row + count
        known = sequence.tokens[start : start + part.count]
        batch.tokens[row : row + len(known)] = known
        if len(known) < part.count:  # drawn by the last step, and not read
            batch.feed[row + part.count - 1] = sequence.row
        batch.positions[row:end] = np.arange(start, start + count)
        if part.last:
            last = row + part.count - 1
            outputs = slice(output, output + count - part.count + 1)
            batch.outputs[outputs] = np.arange(last, end)
            _sampling(batch, outputs, sequence, part)
            if part.draft is not None:
                _drafts(batch, last, output, part)
            wanted.append((part, output))
            output = outputs.stop
        row = end
    return wanted


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
    batch.place[outputs] = np.array(depths) + part.start + part.count


def _drafts(batch: Batch, last: int, output: int, part: Part) -> None:
    """Rows that guess: each sees its own ancestors, and is as far on as they say."""
    draft, size = part.draft, len(part.draft)
    rows, outputs = slice(last, last + 1 + size), slice(output + 1, output + 1 + size)
    depths = np.array(draft.depths)
    batch.tokens[last + 1 : rows.stop] = draft.tokens
    batch.positions[rows] = part.start + depths
    masks = np.array(draft.masks, np.uint32)
    batch.tree_mask[rows, 0] = masks.view(np.int32)
    batch.parents[outputs] = output + np.array(draft.parents)
    homes = batch.slots[last + depths[1:]]
    own = batch.slots[last + 1 : rows.stop]
    batch.homes[outputs] = np.where(homes == own, -1, homes)
