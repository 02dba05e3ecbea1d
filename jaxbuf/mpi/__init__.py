"""Shared replay buffers over MPI: a manager stores and scores what its workers send.

Importing this package does not start MPI. Functions that communicate start it when they are called.
"""

import importlib.util

_MISSING = [name for name in ("mpi4py", "mpi4jax") if importlib.util.find_spec(name) is None]
if _MISSING:
    raise ModuleNotFoundError(
        f"jaxbuf.mpi needs {' and '.join(_MISSING)}: pip install 'jaxbuf[mpi]' (where there is no "
        "MPI yet, pip install mpich first: mpi4jax is built against it)"
    )

from jaxbuf.core import exporting  # noqa: E402
from jaxbuf.mpi.baseline import (  # noqa: E402
    EMA,
    Baseline,
    BaselineFilter,
    Min,
    Percentile,
    baseline_value,
    combine,
    update_average,
)
from jaxbuf.mpi.batch import Batch, Reply  # noqa: E402
from jaxbuf.mpi.layout import (  # noqa: E402
    Communicators,
    Group,
    Layout,
    Role,
    make_communicators,
    node_names,
)
from jaxbuf.mpi.lock_step import LockStep  # noqa: E402
from jaxbuf.mpi.manager import Manager  # noqa: E402
from jaxbuf.mpi.scores import (  # noqa: E402
    DEFAULT,
    NewModes,
    Novelty,
    Retained,
    RewardSum,
    ScoreFunction,
    StatefulScore,
    WeightedSum,
)
from jaxbuf.mpi.serve import Served, serve  # noqa: E402
from jaxbuf.mpi.traffic import Traffic  # noqa: E402
from jaxbuf.mpi.wire import ExchangeError  # noqa: E402
from jaxbuf.mpi.worker import Answer, Drained, Worker  # noqa: E402
from jaxbuf.mpi.worker_state import WorkerState  # noqa: E402

__all__ = [
    "DEFAULT",
    "EMA",
    "Answer",
    "Baseline",
    "BaselineFilter",
    "Batch",
    "Communicators",
    "Drained",
    "ExchangeError",
    "Group",
    "Layout",
    "LockStep",
    "Manager",
    "Min",
    "NewModes",
    "Novelty",
    "Percentile",
    "Reply",
    "Retained",
    "RewardSum",
    "Role",
    "ScoreFunction",
    "Served",
    "StatefulScore",
    "Traffic",
    "WeightedSum",
    "Worker",
    "WorkerState",
    "baseline_value",
    "combine",
    "make_communicators",
    "node_names",
    "serve",
    "update_average",
]

exporting.register_all()
