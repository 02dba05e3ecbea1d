"""A store as a list, and one of an earlier version."""

import numpy as np

from jaxbuf.io import records
from jaxbuf.io.ranges import Ranges


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


def as_format_2(folder):
    """Turn a store into one of version 0.2.0, which had one file and no checksums of rows."""
    rows, _ = records.read(folder / "rows.json")
    deleted, _ = records.read(folder / "deleted.json")
    store, _ = records.read(folder / "store.json")
    runs = Ranges.parse(deleted["deleted"], rows["rows"]).tolist()
    record = {"rows": rows["rows"], "deleted": runs, "freed": []}
    records.write(folder / "rows.json", record)
    records.write(folder / "store.json", store | {"format": 2})
    (folder / "deleted.json").unlink()
    for file in folder.glob("checksums/*"):
        file.unlink()
