"""Counts and times of the messages that a manager handles, for each worker and in total."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_COUNTS = ("requests", "batches", "rows", "bytes", "updates", "stale")
_PHASES = ("receive", "handle", "send")


class Traffic:
    """Counts requests, bytes and time by phase for each worker of a manager.

    A batch is received, handled (stored and scored, in one program) and answered. A request is a
    batch or a request for metadata. Bytes count whole messages in both directions. Updates are rows
    of new scores or priorities, of which the stale ones name items that have left.

    Args:
        names: The names of the workers.

    Example:
        >>> from jaxbuf.mpi import Traffic
        >>> traffic = Traffic(["rank 0", "rank 1"])
        >>> traffic.count(1, requests=1, batches=1, rows=256, bytes=10_000, receive=0.001)
        >>> traffic.metrics()["rank 1/bandwidth"], traffic.metrics()["batches"]
        (10000000.0, 1)
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._counts = np.zeros((len(self.names), len(_COUNTS)), np.int64)
        self._seconds = np.zeros((len(self.names), len(_PHASES)))
        self._received = np.zeros((len(self.names),), np.int64)

    def count(self, worker: int, **amounts: float) -> None:
        """Adds to the counts of a worker.

        Args:
            worker: The number of the worker.
            **amounts: ``requests``, ``batches``, ``rows``, ``bytes`` (received), ``answered``
                (bytes sent), ``updates`` and ``stale``; and the seconds of ``receive``, ``handle``
                and ``send``.
        """
        for name, amount in amounts.items():
            if name in _PHASES:
                self._seconds[worker, _PHASES.index(name)] += amount
            elif name == "answered":
                self._counts[worker, _COUNTS.index("bytes")] += int(amount)
            else:
                self._counts[worker, _COUNTS.index(name)] += int(amount)
                if name == "bytes":
                    self._received[worker] += int(amount)

    def metrics(self) -> dict[str, Any]:
        """Returns all counts and times as Python numbers.

        Returns:
            ``requests``, ``batches``, ``rows``, ``bytes``, ``updates``, ``stale``,
            ``receive_seconds``, ``handle_seconds``, ``send_seconds``, and ``bandwidth``, the bytes
            received per second of receiving (0 if nothing was received); and the same for each
            worker, with its name in front, such as ``rank 1/requests``.
        """
        out = _row(self._counts.sum(0), self._seconds.sum(0), self._received.sum())
        for worker, name in enumerate(self.names):
            of_worker = _row(self._counts[worker], self._seconds[worker], self._received[worker])
            out |= {f"{name}/{key}": value for key, value in of_worker.items()}
        return out

    def table(self) -> str:
        """Returns all counts and times as text: a line for each worker and one for the total."""
        metrics = self.metrics()
        shown = [name for name in _COUNTS if metrics[name] or name not in ("updates", "stale")]
        header = ["", *shown, *(f"{phase} ms" for phase in _PHASES), "MB/s"]
        lines = [header]
        for name, prefix in [*((name, f"{name}/") for name in self.names), ("all", "")]:
            counts = [f"{metrics[prefix + key]:,}" for key in shown]
            seconds = [f"{1e3 * metrics[f'{prefix}{phase}_seconds']:,.1f}" for phase in _PHASES]
            bandwidth = f"{metrics[prefix + 'bandwidth'] / 1e6:,.1f}"
            lines.append([name, *counts, *seconds, bandwidth])
        widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
            for line in lines
        )


def _row(counts: Any, seconds: Any, received: Any) -> dict[str, Any]:
    out: dict[str, Any] = {name: int(n) for name, n in zip(_COUNTS, counts, strict=True)}
    out |= {f"{phase}_seconds": float(s) for phase, s in zip(_PHASES, seconds, strict=True)}
    spent = float(seconds[_PHASES.index("receive")])
    return out | {"bandwidth": float(received) / spent if spent else 0.0}
