"""A manager and its workers in one process: messages go through lists, and the manager is a thread.

Channels, messages and both ends are the real ones; only the communicator is not.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxbuf.mpi import Communicators, Manager, Served, serve, wire


class _Sent(NamedTuple):
    source: int
    tag: int
    data: bytes

    def Recv(self, buffer: list[Any]) -> None:
        buffer[0].reshape(-1)[:] = memoryview(self.data)


class _Done:
    def Test(self) -> bool:
        return True


class Line:
    """The communicator of one rank, which keeps what was sent to each of them."""

    def __init__(self, rank: int, sent: list[list[_Sent]], lock: threading.Lock):
        self._rank, self._sent, self._lock = rank, sent, lock
        self._kept: dict[int, Any] = {}

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._sent)

    def Get_group(self) -> "Line":
        return self

    def Translate_ranks(self, ranks: list[int], other: object) -> list[int]:
        return ranks

    def Get_attr(self, key: int) -> Any:
        return self._kept.get(key)

    def Set_attr(self, key: int, value: object) -> None:
        self._kept[key] = value

    def Isend(self, buffer: list[Any], dest: int, tag: int) -> _Done:
        with self._lock:
            self._sent[dest].append(_Sent(self._rank, tag, buffer[0].tobytes()))
        return _Done()

    def Improbe(self, source: int, tag: int, status: Any) -> _Sent | None:
        from mpi4py import MPI

        with self._lock:
            if not self._sent[self._rank]:
                return None
            sent = self._sent[self._rank].pop(0)
        status.Set_source(sent.source)
        status.Set_tag(sent.tag)
        status.Set_elements(MPI.BYTE, len(sent.data))
        return sent


def lines(ranks: int) -> list[Line]:
    """Returns the communicators of a group, of which the last one is the manager's."""
    sent: list[list[_Sent]] = [[] for _ in range(ranks)]
    lock = threading.Lock()
    # The process makes the key of runs at the first one, which two threads must not do at once.
    wire._count_run(Line(0, sent, lock))
    return [Line(rank, sent, lock) for rank in range(ranks)]


def run(
    manager: Manager,
    work: Callable[[Communicators], Any],
    *,
    rows: int,
    group: list[Line] | None = None,
    **options: Any,
) -> tuple[Served, Any]:
    """Serves one worker, whose program is ``work`` in this thread; returns what both returned.

    An earlier run gives its communicators as ``group``; others are options of `serve`.
    """
    ours, theirs = lines(2) if group is None else group
    with ThreadPoolExecutor(1) as pool:
        options = {"timeout": 30.0, "report": None, **options}
        ends = Communicators(theirs, None, object(), None)
        served = pool.submit(serve, ends, manager, rows=rows, **options)
        result = work(Communicators(ours, None, None, object()))
        return served.result(60), result
