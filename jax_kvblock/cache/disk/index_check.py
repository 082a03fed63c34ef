"""An lmdb file's pages, walked before lmdb sees them.

lmdb trusts its file: a page that is not what it should be ends the process by an
assertion or a signal. So the two trees that a transaction starts from, of records and
of free pages, are walked here first: each page is where its number says, has its kind,
is reached once, and what it points to lies in it or in the file; no free page is in
use. The layout is lmdb's 0.9, data version 1, of 64-bit machines.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

_SIZE = mmap.PAGESIZE
_META_PAGES = 2
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIG = 1  # of a node: its data lies on pages of its own
_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
_NONE = (1 << 64) - 1  # the root of an empty tree
_PAGE = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
_NODE = struct.Struct("<HHHH")  # size or child's number, flags, size of the key
_HEAD = struct.Struct("<IIQQ")  # of a meta page: magic, version, address, map size
_TREE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, three counts, entries, root
_TAIL = struct.Struct("<QQ")  # last page, transaction

_Tree = tuple[int, int]  # its depth, the page of its root


class Damage(Exception):
    """What is wrong with the file."""


def check_heads(path: Path) -> None:
    """Raises `Damage` unless the file begins as an index; lmdb may open it then."""
    with _mapped(path) as pages:
        for n in range(_META_PAGES):
            _meta(pages, n)


def check_pages(path: Path, transaction: int) -> bool:
    """Raises `Damage` where the pages of a transaction are not as lmdb leaves them.

    The caller has that transaction open, so that its pages stay. False where two later
    ones have taken its place as the newest: take a new one.
    """
    with _mapped(path) as pages:
        for n in range(_META_PAGES):
            found, free, main = _meta(pages, n)
            if found == transaction:
                _Walk(pages).run(free, main)
                return True
    return False


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < _META_PAGES * _SIZE:
            raise Damage(f"it ends after {size} bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            yield pages


def _meta(pages: mmap.mmap, n: int) -> tuple[int, _Tree, _Tree]:
    """The transaction of a meta page, the trees of free pages and of records."""
    at = n * _SIZE
    number, _, flags, _, _ = _PAGE.unpack_from(pages, at)
    at += _PAGE.size
    magic, version, _, _ = _HEAD.unpack_from(pages, at)
    if (number, flags, magic) != (n, _META, _MAGIC):
        raise Damage(f"page {n} is no head of an index")
    if version != _DATA_VERSION:
        raise Damage(f"it is of lmdb's format {version}, not {_DATA_VERSION}")
    at += _HEAD.size
    trees = [_TREE.unpack_from(pages, at + i * _TREE.size) for i in (0, 1)]
    _, transaction = _TAIL.unpack_from(pages, at + 2 * _TREE.size)
    if trees[0][0] != _SIZE:
        raise Damage(f"its pages have {trees[0][0]} bytes, not {_SIZE}")
    if trees[1][1]:
        raise Damage("its records are no plain tree")
    free, main = ((tree[2], tree[7]) for tree in trees)
    return transaction, free, main


class _Walk:
    def __init__(self, pages: mmap.mmap) -> None:
        self._pages = pages
        self._end = len(pages) // _SIZE
        self._seen: set[int] = set()

    def run(self, free: _Tree, main: _Tree) -> None:
        for _ in self._leaves(main):
            pass
        free_pages: set[int] = set()
        for place in self._leaves(free):
            free_pages.update(self._numbers(place))
        if both := free_pages & self._seen:
            raise Damage(f"page {min(both)} is in use and free")

    def _leaves(self, tree: _Tree) -> Iterator[int]:
        """Where each node of the leaves begins, in bytes of the file."""
        depth, root = tree
        if root == _NONE:
            return
        level = [root]
        for kind in [_BRANCH] * (depth - 1) + [_LEAF]:
            below: list[int] = []
            for number in level:
                for place in self._nodes(number, kind):
                    if kind == _LEAF:
                        yield place
                    else:
                        below.append(self._child(place))
            level = below

    def _nodes(self, number: int, kind: int) -> list[int]:
        """Where the nodes of a page begin, each whole in the page."""
        at = self._visit(number, kind)
        _, _, _, lower, upper = _PAGE.unpack_from(self._pages, at)
        if not _PAGE.size <= lower <= upper <= _SIZE or lower % 2:
            raise Damage(f"page {number} has no room for what it holds")
        count = (lower - _PAGE.size) // 2
        places = struct.unpack_from(f"<{count}H", self._pages, at + _PAGE.size)
        if not places:
            raise Damage(f"page {number} is empty")
        for i, place in enumerate(places):
            end = place + _NODE.size
            if place < upper or end > _SIZE:
                raise Damage(f"page {number} points out of itself")
            low, high, flags, key = _NODE.unpack_from(self._pages, at + place)
            end += key
            whole = bool(key) or (kind == _BRANCH and not i)
            if kind == _LEAF:
                end += 8 if flags == _BIG else low | high << 16
                whole &= flags in (0, _BIG)
            if end > _SIZE or not whole:
                raise Damage(f"page {number} has a node that is not whole")
        return [at + place for place in places]

    def _child(self, place: int) -> int:
        low, high, flags, _ = _NODE.unpack_from(self._pages, place)
        return low | high << 16 | flags << 32

    def _numbers(self, place: int) -> tuple[int, ...]:
        """A list of free pages: how many, then their numbers."""
        low, high, flags, key = _NODE.unpack_from(self._pages, place)
        size, at = low | high << 16, place + _NODE.size + key
        if flags == _BIG:
            (first,) = struct.unpack_from("<Q", self._pages, at)
            at = self._long(first, size)
        count = struct.unpack_from("<Q", self._pages, at)[0] if size >= 8 else -1
        if size != 8 * (count + 1) or key != 8:
            raise Damage("a list of free pages is not whole")
        numbers = struct.unpack_from(f"<{count}Q", self._pages, at + 8)
        if any(not _META_PAGES <= number < self._end for number in numbers):
            raise Damage("a free page is not in it, or a head")
        return numbers

    def _long(self, first: int, size: int) -> int:
        """Where data on pages of their own begins."""
        at = self._visit(first, _OVERFLOW)
        (pages,) = struct.unpack_from("<I", self._pages, at + 12)
        if first + pages > self._end or _PAGE.size + size > pages * _SIZE:
            raise Damage(f"the data from page {first} is not whole")
        self._seen.update(range(first, first + pages))
        return at + _PAGE.size

    def _visit(self, number: int, kind: int) -> int:
        """Where a page begins that is reached for the first time."""
        if not _META_PAGES <= number < self._end:
            raise Damage(f"page {number} is not in it")
        if number in self._seen:
            raise Damage(f"page {number} is reached twice")
        self._seen.add(number)
        at = number * _SIZE
        here, _, flags, _, _ = _PAGE.unpack_from(self._pages, at)
        if here != number or flags != kind:
            raise Damage(f"page {number} is not what it should be")
        return at
