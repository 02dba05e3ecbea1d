"""A store as a list."""

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
