"""A store as a list, and what becomes of its files."""

import contextlib

import numpy as np


class ReferenceStore:
    """Rows in a list, and which of them are deleted in a set."""

    def __init__(self):
        self.rows = []
        self.deleted = set()

    def append(self, items, start=None):
        start = len(self.rows) if start is None else start
        self.rows += list(items)[len(self.rows) - start :]

    def delete(self, rows):
        self.deleted |= set(rows)

    @property
    def live(self):
        return np.asarray([i for i in range(len(self.rows)) if i not in self.deleted], np.int64)


def damaged(data):
    """The bytes of a file as disks and people spoil them; None if the file is gone."""
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 0x10
    return bytes(flipped), data[: len(data) // 2], data + b"12345", b"", None


@contextlib.contextmanager
def exchanged(one, two):
    """Two files have each other's contents for a while."""
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    yield
    one.write_bytes(first)
    two.write_bytes(second)
