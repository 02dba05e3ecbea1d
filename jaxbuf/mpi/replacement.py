"""Workers as a population: those that do worst go on from the average of others.

References:
    Jaderberg et al., Population Based Training of Neural Networks, 2017,
    https://arxiv.org/abs/1711.09846 (those that do worst go on from those that do best).

    Lahlou et al., torchgfn: A PyTorch GFlowNet library, 2023, https://arxiv.org/abs/2305.14594
    (its distributed examples replace agents by the mean of random others).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt

from jaxbuf.buffers import common
from jaxbuf.core import checks, describe, numbers, sizes, storage

if TYPE_CHECKING:
    from mpi4py import MPI

Average = Literal["mean", "weighted_mean", "best"]

# Infinite scores count as this: their differences are finite, and the inverse of these is normal.
_LARGEST = 1e30


class Choice(NamedTuple):
    """Who is replaced, and by whom.

    Attributes:
        replaced: Which ranks, ``[W]``.
        weights: In row ``i`` the share of each rank in what rank ``i`` is replaced by, ``[W, W]``:
            a row sums to 1, or is zero if its rank stays.
    """

    replaced: Bool[Array, " W"]
    weights: Float[Array, "W W"]


@dataclasses.dataclass(frozen=True)
class ReplaceWorst:
    """Which ranks are replaced, by the average of which others.

    A rank is replaced if it is old enough, and by each of ``threshold`` and ``worst_ratio`` that is
    given; with neither, age alone decides. The best rank stays in any case, and no score is a
    reason to replace one that scores as much. A rank without a score (NaN) is the worst there is,
    and nobody gets anything from it. Donors are drawn for each replaced rank on its own, from those
    that stay, so that ranks do not all become the same.

    Attributes:
        threshold: Replaces ranks that score less.
        worst_ratio: Replaces this share of the ranks, those of lowest scores: rounded down, but at
            least one; above 0 and at most 1. Equal scores are told apart at random.
        age: How many calls a rank is spared from the beginning, or since it was last replaced: a
            whole number, or the least and the largest of a range from which each draws its own.
        donor_ratio: How many donors a rank gets, as a share of all ranks: rounded down, but at
            least one, and no more than there are; above 0 and at most 1.
        average: ``"mean"`` of donors; ``"weighted_mean"``, by how much each scores above the worst
            rank of all; or ``"best"``, the best rank alone.
        momentum: The share of its own parameters that a replaced rank keeps, from 0 to below 1.
        every: Ranks are compared in every so many calls; in others nothing travels.

    Raises:
        ValueError: If a value is out of its range, or nothing says who is replaced.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxbuf.mpi import ReplaceWorst
        >>> rule = ReplaceWorst(worst_ratio=0.25, age=10, average="weighted_mean", donor_ratio=1)
        >>> score, age = jnp.array([1.0, 3.0, 4.0, 0.0]), jnp.array([20, 20, 5, 20])
        >>> replaced, weights = rule.choose(jax.random.key(0), score, age)
        >>> replaced.tolist(), weights[3].tolist()
        ([False, False, False, True], [0.125, 0.375, 0.5, 0.0])
    """

    threshold: float | None = None
    worst_ratio: float | None = None
    age: int | tuple[int, int] = 0
    donor_ratio: float = 0.5
    average: Average = "mean"
    momentum: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        for name, expected, legal in (
            ("threshold", "a score, or None", lambda x: not math.isnan(x)),
            ("worst_ratio", "a number above 0 and at most 1, or None", lambda x: 0 < x <= 1),
            ("donor_ratio", "a number above 0 and at most 1", lambda x: 0 < x <= 1),
            ("momentum", "a number from 0 to below 1", lambda x: 0 <= x < 1),
        ):
            value = getattr(self, name)
            if value is not None or name in ("donor_ratio", "momentum"):
                number = checks.check_number(name, value, expected, legal)
                object.__setattr__(self, name, number)
        object.__setattr__(self, "every", common.check_count("every", self.every))
        object.__setattr__(self, "age", _check_ages(self.age))
        checks.check_choice("average", self.average, get_args(Average))
        if self.threshold is None and self.worst_ratio is None and self.ages[1] == 0:
            raise ValueError("nothing says who is replaced; give threshold, worst_ratio or age")

    @property
    def ages(self) -> tuple[int, int]:
        """The range from which each rank draws how many calls it is spared."""
        return self.age if isinstance(self.age, tuple) else (self.age, self.age)

    def choose(
        self,
        key: PRNGKeyArray,
        score: Float[Array, " W"],
        age: Int[Array, " W"],
        spared: Int[Array, " W"] | None = None,
    ) -> Choice:
        """Who is replaced, and by whom: the same on every rank that passes the same.

        Args:
            key: Tells equal scores apart, and draws donors.
            score: Of each rank, in one unit, the higher the better; NaN if it has none.
            age: Calls of each since the beginning, or since it was last replaced.
            spared: For how many calls each rank is spared; None takes the least of ``age``.

        Raises:
            ValueError: When traced, if a shape or dtype differs.
        """
        ranks = (math.prod(numbers.abstract(score, "score").shape),)
        score = storage.check_rows(score, "score", ranks, np.float32, "(W,)")
        age = storage.check_rows(age, "age", ranks, np.int32, "(W,)")
        least = jnp.full(ranks, self.ages[0], jnp.int32)
        if spared is not None:
            least = storage.check_rows(spared, "spared", ranks, np.int32, "(W,)")
        tie_key, donor_key = jax.random.split(key)
        known = ~jnp.isnan(score)
        score = jnp.clip(score, -_LARGEST, _LARGEST)

        shuffled = jax.random.permutation(tie_key, ranks[0])
        order = jnp.lexsort((shuffled, jnp.where(known, score, jnp.float32(0)), known))
        place = jnp.zeros(ranks, jnp.int32).at[order].set(jnp.arange(ranks[0], dtype=jnp.int32))
        best = place == ranks[0] - 1
        worse = ~known | (score < score[order[-1]])

        # If the best has no score, none has one to give.
        replaced = (age >= least) & ~best & known[order[-1]]
        if self.threshold is not None:
            replaced &= worse & (~known | (score < jnp.float32(self.threshold)))
        if self.worst_ratio is not None:
            replaced &= worse & (place < _share(self.worst_ratio, ranks[0]))

        donors = best if self.average == "best" else known & ~replaced
        point = jax.random.uniform(donor_key, (*ranks, *ranks), jnp.float32)
        point = jnp.where(donors[None], point, jnp.float32(2))
        turn = jnp.argsort(jnp.argsort(point, axis=1), axis=1)
        drawn = donors[None] & (turn < _share(self.donor_ratio, ranks[0]))
        weights = drawn.astype(jnp.float32)
        if self.average == "weighted_mean":
            worst = jnp.min(score, where=known, initial=_LARGEST)
            above = jnp.where(drawn, (score - worst)[None], jnp.float32(0))
            most = jnp.max(above, axis=1, keepdims=True)
            # They all score as little as the worst: then they count alike.
            weights = jnp.where(most > 0, above / jnp.where(most > 0, most, 1.0), weights)
        total = jnp.sum(weights, axis=1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1.0)
        return Choice(replaced, jnp.where(replaced[:, None], weights, jnp.float32(0)))


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """A communicator as configuration: those of one handle are the same."""

    comm: Any

    def __hash__(self) -> int:
        return hash((self.rank, self.size))

    @property
    def rank(self) -> int:
        return self.comm.Get_rank()

    @property
    def size(self) -> int:
        return self.comm.Get_size()


class Population(struct.PyTreeNode):
    """One rank's part in a population of which the worst are replaced: an immutable pytree.

    Ranks are compared in one unit whatever their ages: by their mean score per call since they
    began or were last replaced. Calls without a score (NaN) do not count in it, and infinite scores
    as ±1e30. A rank with a parameter that is not finite has no score.

    Attributes:
        age: Calls since it began or was last replaced, ``[]``.
        spared: For how many of them it is not replaced, ``[]``.
        score: The mean score of those that had one, ``[]``.
        scored: How many had one, ``[]``.
        counters: Calls, how often this rank was replaced, and how often any was, ``[3]`` uint32;
            they wrap.
        rule: Who is replaced, and by whom.
        ranks: The communicator.

    Example:
        Under ``mpiexec -n 4 python program.py``, three workers of a manager run this program, in
        which the training step returns new parameters and a score, such as new modes:

        >>> import jax, jax.numpy as jnp
        >>> from jaxbuf.mpi import Layout, Population, ReplaceWorst, make_communicators
        >>> rule = ReplaceWorst(worst_ratio=0.3, age=100, average="weighted_mean", every=20)
        >>> training = make_communicators(Layout(4)).training  # doctest: +SKIP
        >>> population = Population.create(rule, training, jax.random.key(0))  # doctest: +SKIP
        >>> @jax.jit
        ... def step(population, key, params):
        ...     params, score = train(params)
        ...     return population.update(key, params, score)
        >>> population, params, replaced = step(population, key, params)  # doctest: +SKIP
    """

    age: Int[Array, ""]
    spared: Int[Array, ""]
    score: Float[Array, ""]
    scored: Int[Array, ""]
    counters: UInt[Array, " 3"]
    rule: ReplaceWorst = struct.field(pytree_node=False)
    ranks: _Ranks = struct.field(pytree_node=False)

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @classmethod
    def create(cls, rule: ReplaceWorst, comm: "MPI.Intracomm", key: PRNGKeyArray) -> Self:
        """This rank's part. Every rank of ``comm`` calls this alike.

        Args:
            rule: Who is replaced, and by whom.
            comm: Those that are compared, such as ``Communicators.training``.
            key: Draws for how long each rank is spared.

        Raises:
            ValueError: If ``rule`` is none, or this rank is not in ``comm``.
        """
        if not isinstance(rule, ReplaceWorst):
            raise ValueError(f"rule is {rule!r}; expected jaxbuf.mpi.ReplaceWorst(...)")
        if comm is None:
            raise ValueError("this rank is not in comm; only those that train are compared")
        ranks = _Ranks(comm)
        return cls(
            age=jnp.int32(0),
            spared=_draw_spared(rule, key, ranks),
            score=jnp.float32(0),
            scored=jnp.int32(0),
            counters=jnp.zeros((3,), jnp.uint32),
            rule=rule,
            ranks=ranks,
        )

    def update(
        self, key: PRNGKeyArray, params: PyTree[Array], score: float | Float[Array, ""]
    ) -> tuple[Self, PyTree[Array], Bool[Array, ""]]:
        """Count a call, and replace the worst: every rank calls this, equally often, also in jit.

        One short message goes around for the comparison, and one sum of parameters for each rank
        that is replaced.

        Args:
            key: Source of the choice; that of the first rank counts.
            params: What is averaged, floating point numbers of any shapes, alike on every rank.
            score: What this rank's training since the last call is worth, in one unit on all ranks,
                the higher the better; NaN if it is not known.

        Returns:
            This part, going on; the parameters to go on with; and whether they were replaced, for
            those who begin with a new optimizer then.

        Raises:
            ValueError: When traced, if there are no parameters, or a leaf is not floating point.
        """
        leaves = _check_params(params)
        score = storage.check_rows(score, "score", (), np.float32, "a number")
        there = ~jnp.isnan(score)
        scored = self.scored + there.astype(jnp.int32)
        error = jnp.clip(score, -_LARGEST, _LARGEST) - self.score
        mean = self.score + error / jnp.maximum(scored, 1).astype(jnp.float32)
        counted = self.replace(
            age=self.age + 1,
            score=jnp.where(there, mean, self.score),
            scored=scored,
            counters=self.counters.at[0].add(1),
        )
        compares = counted.counters[0] % jnp.uint32(self.rule.every) == 0
        after, leaves, replaced = (
            _compare(counted, key, leaves)
            if self.rule.every == 1
            else lax.cond(compares, _compare, _go_on, counted, key, leaves)
        )
        params = jax.tree.unflatten(jax.tree.structure(params), leaves)
        return cast("Self", after), params, replaced

    def metrics(self) -> dict[str, Array]:
        """Numbers of this rank worth watching, all scalars.

        Returns:
            ``score``, the mean per call since it was last replaced, NaN if there is none, and
            ``age``, these calls; ``calls`` of all time, in how many of them it was ``replaced``,
            and ``replacements`` of all ranks.
        """
        names = ("calls", "replaced", "replacements")
        return {
            "score": _known_score(self),
            "age": self.age,
            **{name: self.counters[..., k] for k, name in enumerate(names)},
        }


def _compare(
    population: Population, key: PRNGKeyArray, leaves: list[Array]
) -> tuple[Population, list[Array], Bool[Array, ""]]:
    import mpi4jax

    rule, ranks = population.rule, population.ranks
    healthy = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]).all()
    own = jnp.where(healthy, _known_score(population), jnp.float32(jnp.nan))
    # If ranks drew from different keys, they would wait for each other forever.
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    bits = jax.random.key_data(key) if is_typed else key
    facts = jnp.stack([_as_int(own), population.age, population.spared])
    told = mpi4jax.allgather(jnp.concatenate([facts, _as_int(bits)]), comm=ranks.comm)
    bits = lax.bitcast_convert_type(told[0, 3:], jnp.uint32)
    key = jax.random.wrap_key_data(bits, impl=jax.random.key_impl(key)) if is_typed else bits
    choose_key, spared_key = jax.random.split(key)
    score = lax.bitcast_convert_type(told[:, 0], jnp.float32)
    choice = rule.choose(choose_key, score, told[:, 1], told[:, 2])

    replaced = choice.replaced[ranks.rank]

    def give_and_take(leaves: list[Array]) -> list[Array]:
        averaged = _average(choice, leaves, ranks)
        return [
            jnp.where(replaced, _mix(own, other, rule.momentum), own)
            for own, other in zip(leaves, averaged, strict=True)
        ]

    # All ranks know who is replaced. With nobody, nothing travels, and nothing is copied.
    leaves = lax.cond(jnp.any(choice.replaced), give_and_take, list, leaves)
    counts = [replaced, jnp.sum(choice.replaced)]
    counts = jnp.stack([jnp.uint32(0), *(count.astype(jnp.uint32) for count in counts)])
    begins = {
        "age": jnp.int32(0),
        "spared": _draw_spared(rule, spared_key, ranks),
        "score": jnp.float32(0),
        "scored": jnp.int32(0),
    }
    after = population.replace(
        counters=population.counters + counts,
        **{
            name: jnp.where(replaced, value, getattr(population, name))
            for name, value in begins.items()
        },
    )
    return after, leaves, replaced


def _go_on(
    population: Population, key: PRNGKeyArray, leaves: list[Array]
) -> tuple[Population, list[Array], Bool[Array, ""]]:
    del key
    return population, leaves, jnp.bool_(False)


def _average(choice: Choice, leaves: Sequence[Array], ranks: _Ranks) -> list[Array]:
    """What this rank gets from its donors, in wide dtypes; what it has, if it is not replaced."""
    import mpi4jax
    from mpi4py import MPI

    # MPI does not know the small floats, and sums of them are rough.
    wide = [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x for x in leaves]
    dtypes = sorted({leaf.dtype for leaf in wide}, key=str)
    packed = [
        jnp.concatenate([leaf.reshape(-1) for leaf in wide if leaf.dtype == dtype])
        for dtype in dtypes
    ]
    receivers = jnp.argsort(~choice.replaced, stable=True)

    def give(turn: Array, received: list[Array]) -> list[Array]:
        receiver = receivers[turn]
        share = choice.weights[receiver, ranks.rank]
        # Who gives nothing may hold what is not finite.
        given = [jnp.where(share > 0, share.astype(x.dtype) * x, jnp.zeros_like(x)) for x in packed]
        sums = [mpi4jax.allreduce(x, op=MPI.SUM, comm=ranks.comm) for x in given]
        mine = receiver == ranks.rank
        return [jnp.where(mine, x, old) for x, old in zip(sums, received, strict=True)]

    count = jnp.sum(choice.replaced, dtype=jnp.int32)
    received = dict(zip(dtypes, lax.fori_loop(jnp.int32(0), count, give, packed), strict=True))
    out: list[Array] = []
    taken = dict.fromkeys(dtypes, 0)
    for leaf in wide:
        start = taken[leaf.dtype]
        taken[leaf.dtype] = start + leaf.size
        out.append(received[leaf.dtype][start : start + leaf.size].reshape(leaf.shape))
    return out


def _mix(own: Array, other: Array, momentum: float) -> Array:
    """``other`` and a share of ``own``, where that is finite; in the dtype of ``own``."""
    kept = jnp.asarray(momentum, other.dtype)
    mixed = kept * own.astype(other.dtype) + (1 - kept) * other
    return jnp.where(jnp.isfinite(own), mixed, other).astype(own.dtype)


def _known_score(population: Population) -> Float[Array, ""]:
    return jnp.where(population.scored > 0, population.score, jnp.float32(jnp.nan))


def _draw_spared(rule: ReplaceWorst, key: PRNGKeyArray, ranks: _Ranks) -> Int[Array, ""]:
    low, high = rule.ages
    return jax.random.randint(key, (ranks.size,), low, high + 1, jnp.int32)[ranks.rank]


def _as_int(x: Array) -> Int[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.int32)


def _share(ratio: float, ranks: int) -> int:
    """This share of the ranks, rounded down, but at least one."""
    # 0.29 * 100 is a little less than 29.
    return max(1, math.floor(ratio * ranks + 1e-6))


def _check_params(params: PyTree) -> list[Array]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError("params has no leaves; pass the parameters to average")
    for path, leaf in leaves:
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has dtype {dtype}; only floating point "
                "numbers are averaged, so pass the parameters without it"
            )
    return [jnp.asarray(leaf) for _, leaf in leaves]


def _check_ages(age: Any) -> int | tuple[int, int]:
    ages = tuple(age) if isinstance(age, list | tuple) else (age,)
    if len(ages) not in (1, 2):
        raise ValueError(
            f"age is {checks.name_of(age)}; expected an integer, or the least and the largest of a "
            "range"
        )
    least, largest = (sizes.check_count("age", one, 0, 2**31 - 2) for one in (ages[0], ages[-1]))
    if least > largest:
        raise ValueError(f"age is {age!r}; expected the least of the range before the largest")
    return least if len(ages) == 1 else (least, largest)
