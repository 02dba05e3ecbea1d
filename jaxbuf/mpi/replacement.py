"""Workers as a population: the worst ones continue from the average of others.

References:
    Jaderberg et al., Population Based Training of Neural Networks, 2017,
    https://arxiv.org/abs/1711.09846 (the worst members continue from the best).

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
from jaxbuf.core import checks, describe, numbers, sizes, storage, trees
from jaxbuf.mpi.layout import Ranks

if TYPE_CHECKING:
    from mpi4py import MPI

Average = Literal["mean", "weighted_mean", "best"]

# Infinite scores are clipped to this, so that differences are finite and can be inverted.
_LARGEST = 1e30


class Choice(NamedTuple):
    """The ranks to replace, and the averages that replace them.

    Attributes:
        replaced: True for the ranks to replace, ``[W]``.
        weights: Row ``i`` holds the weight of each rank in the average that replaces rank ``i``,
            ``[W, W]``. A row sums to 1, or is zero if its rank is not replaced.
    """

    replaced: Bool[Array, " W"]
    weights: Float[Array, "W W"]


@dataclasses.dataclass(frozen=True)
class ReplaceWorst:
    """Replaces the worst ranks by averages of others.

    A rank is replaced if it is old enough and meets ``threshold`` and ``worst_ratio``, as far as
    they are given; with neither, age alone decides. The best rank and ranks with the same score are
    never replaced because of their score. A rank without a score (NaN) ranks last and is never a
    donor. Donors are drawn separately for each replaced rank from the ranks that are kept, so that
    the replaced ranks differ.

    Attributes:
        threshold: Replaces ranks that score less.
        worst_ratio: Replaces this share of the ranks, those with the lowest scores, rounded down
            but at least one; above 0 and at most 1. Ties are broken at random.
        age: The number of calls, since the beginning or since it was last replaced, before a rank
            can be replaced: an integer, or the bounds of a range from which each rank draws its
            own.
        donor_ratio: The number of donors of a rank as a share of all ranks, rounded down but at
            least one, and at most as many as there are; above 0 and at most 1.
        average: ``"mean"`` of the donors; ``"weighted_mean"``, weighted by how much each scores
            above the worst of all ranks; or ``"best"``, the best rank alone.
        momentum: The share of its own parameters that a replaced rank keeps, at least 0 and
            below 1.
        every: Ranks are compared once in this many calls. Other calls do not communicate.

    Raises:
        ValueError: If a value is out of its range, or none of ``threshold``, ``worst_ratio`` and
            ``age`` is given.

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
            ("momentum", "a number of at least 0 and below 1", lambda x: 0 <= x < 1),
        ):
            value = getattr(self, name)
            if value is not None or name in ("donor_ratio", "momentum"):
                number = checks.check_number(name, value, expected, legal)
                object.__setattr__(self, name, number)
        object.__setattr__(self, "every", common.check_count("every", self.every))
        object.__setattr__(self, "age", _check_ages(self.age))
        checks.check_choice("average", self.average, get_args(Average))
        if self.threshold is None and self.worst_ratio is None and self.ages[1] == 0:
            raise ValueError("no rank would ever be chosen; give threshold, worst_ratio or age")

    @property
    def ages(self) -> tuple[int, int]:
        """The bounds of the range from which each rank draws the calls that it is spared."""
        return self.age if isinstance(self.age, tuple) else (self.age, self.age)

    def choose(
        self,
        key: PRNGKeyArray,
        score: Float[Array, " W"],
        age: Int[Array, " W"],
        spared: Int[Array, " W"] | None = None,
    ) -> Choice:
        """Chooses the ranks to replace. Ranks that pass the same arguments get the same choice.

        Args:
            key: The key that breaks ties and draws donors.
            score: The score of each rank, ``[W]``, higher is better; NaN if it has none.
            age: The calls of each rank since the beginning, or since it was last replaced, ``[W]``.
            spared: The calls for which each rank is spared, ``[W]``; None takes the lower bound of
                ``age``.

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

        # If the best rank has no score, no rank has one, so there are no donors.
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
            # If all donors score as little as the worst rank, they get equal weights.
            weights = jnp.where(most > 0, above / jnp.where(most > 0, most, 1.0), weights)
        total = jnp.sum(weights, axis=1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1.0)
        return Choice(replaced, jnp.where(replaced[:, None], weights, jnp.float32(0)))


class Population(struct.PyTreeNode):
    """One rank's part in a population whose worst members are replaced: an immutable pytree.

    Ranks are compared by their mean score per call since they began or were last replaced, so ranks
    of different ages can be compared. Calls without a score (NaN) do not count, and infinite scores
    count as ±1e30. A rank with a parameter that is not finite has no score.

    Attributes:
        age: The number of calls since the rank began or was last replaced, ``[]``.
        spared: The number of these calls in which it cannot be replaced, ``[]``.
        score: The mean score of the calls that had one, ``[]``.
        scored: The number of calls that had a score, ``[]``.
        counters: Calls, replacements of this rank, and replacements of all ranks, ``[3]`` uint32;
            they wrap.
        rule: The rule that chooses the ranks to replace.
        ranks: The communicator.

    Example:
        Under ``mpiexec -n 4 python program.py``, three workers of a manager run this program. The
        training step returns new parameters and a score, such as the number of new modes:

        >>> import jax, jax.numpy as jnp
        >>> from jaxbuf.mpi import Layout, Population, ReplaceWorst, make_communicators
        >>> rule = ReplaceWorst(worst_ratio=0.3, age=100, average="weighted_mean", every=20)
        >>> training = make_communicators(Layout(4)).training  # doctest: +SKIP
        >>> population = Population.create(rule, jax.random.key(0), training)  # doctest: +SKIP
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
    ranks: Ranks = struct.field(pytree_node=False)

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @classmethod
    def create(cls, rule: ReplaceWorst, key: PRNGKeyArray, comm: "MPI.Intracomm") -> Self:
        """Creates this rank's part. Every rank of ``comm`` calls this with the same arguments.

        Args:
            rule: The rule that chooses the ranks to replace.
            key: The key from which each rank draws how long it is spared.
            comm: The communicator of the ranks to compare, such as ``Communicators.training``.

        Raises:
            ValueError: If ``rule`` is not a ``ReplaceWorst``, or this rank is not in ``comm``.
        """
        checks.check_kind("rule", rule, ReplaceWorst, "jaxbuf.mpi.ReplaceWorst(...)")
        if comm is None:
            raise ValueError("this rank is not in comm; only its members are compared")
        ranks = Ranks(comm)
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
        """Counts a call, and replaces the worst ranks. Every rank calls this equally often.

        It works inside jit. A comparison exchanges one short message, and a sum of each parameter
        for each rank that is replaced.

        Args:
            key: The key of the choice. The key of the first rank is used on all ranks.
            params: The parameters to average: floating-point arrays, with the same shapes on every
                rank.
            score: The score of this rank's training since the last call, higher is better; NaN if
                it is not known.

        Returns:
            The new part, the new parameters, and whether they were replaced, ``[]`` bool; if so,
            the caller may want to reset its optimizer.

        Raises:
            ValueError: When traced, if there are no parameters, or a leaf is not floating-point.
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
        """Returns metrics of this rank, all scalars.

        Returns:
            ``score``, the mean score per call since it was last replaced, NaN without one;
            ``age``, the number of calls since then; ``calls`` in total; how often this rank was
            ``replaced``; and the ``replacements`` of all ranks.
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
    # All ranks use the key of the first: if they chose differently, they would deadlock.
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

    # All ranks have made the same choice. If it is empty, nothing is sent and nothing is copied.
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


def _average(choice: Choice, leaves: Sequence[Array], ranks: Ranks) -> list[Array]:
    """Returns the average of this rank's donors, in wide dtypes; its own leaves without donors."""
    import mpi4jax
    from mpi4py import MPI

    # MPI does not know the small floats, and their sums would be inaccurate.
    wide = [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x for x in leaves]
    receivers = jnp.argsort(~choice.replaced, stable=True)

    def give(turn: Array, received: list[Array]) -> list[Array]:
        receiver = receivers[turn]
        share = choice.weights[receiver, ranks.rank]
        # A rank with weight 0 may hold values that are not finite.
        given = [jnp.where(share > 0, share.astype(x.dtype) * x, jnp.zeros_like(x)) for x in wide]
        sums = [mpi4jax.allreduce(x, op=MPI.SUM, comm=ranks.comm) for x in given]
        mine = receiver == ranks.rank
        return [jnp.where(mine, x, old) for x, old in zip(sums, received, strict=True)]

    count = jnp.sum(choice.replaced, dtype=jnp.int32)
    return lax.fori_loop(jnp.int32(0), count, give, wide)


def _mix(own: Array, other: Array, momentum: float) -> Array:
    """Mixes ``other`` with a share of ``own``, where that is finite, in the dtype of ``own``."""
    kept = jnp.asarray(momentum, other.dtype)
    mixed = kept * own.astype(other.dtype) + (1 - kept) * other
    return jnp.where(jnp.isfinite(own), mixed, other).astype(own.dtype)


def _known_score(population: Population) -> Float[Array, ""]:
    return jnp.where(population.scored > 0, population.score, jnp.float32(jnp.nan))


def _draw_spared(rule: ReplaceWorst, key: PRNGKeyArray, ranks: Ranks) -> Int[Array, ""]:
    low, high = rule.ages
    return jax.random.randint(key, (ranks.size,), low, high + 1, jnp.int32)[ranks.rank]


def _as_int(x: Array) -> Int[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.int32)


def _share(ratio: float, ranks: int) -> int:
    """Returns this share of the ranks, rounded down, but at least one."""
    # In floating point, 0.29 * 100 is slightly less than 29.
    return max(1, math.floor(ratio * ranks + 1e-6))


def _check_params(params: PyTree) -> list[Array]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError("params has no leaves; pass the parameters to average")
    for path, leaf in leaves:
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has dtype {dtype}; only floating-point "
                "leaves can be averaged, so pass the parameters without it"
            )
    return [jnp.asarray(trees.owned(leaf)) for _, leaf in leaves]


def _check_ages(age: Any) -> int | tuple[int, int]:
    ages = tuple(age) if isinstance(age, list | tuple) else (age,)
    if len(ages) not in (1, 2):
        raise ValueError(
            f"age is {checks.name_of(age)}; expected an integer, or the lower and the upper "
            "bound of a range"
        )
    least, largest = (sizes.check_count("age", one, 0, 2**31 - 2) for one in (ages[0], ages[-1]))
    if least > largest:
        raise ValueError(f"age is {age!r}; expected the lower bound of the range before the upper")
    return least if len(ages) == 1 else (least, largest)
