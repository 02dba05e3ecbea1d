"""Figures of buffers: the ages of items by slot, and distributions over the items."""

import dataclasses
import importlib
import io
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from jaxbuf.buffers.buffer import as_buffer, owns_items
from jaxbuf.core import checks, trees
from jaxbuf.core.donation import check_not_donated
from jaxbuf.wrappers.hosted import Hosted
from jaxbuf.wrappers.sharded.sharded import Sharded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The most points across and down a map (beyond it, slots share a point), and bars of a histogram.
_COLUMNS, _ROWS, _BINS = 512, 64, 40
_PANELS_PER_ROW = 3


@dataclasses.dataclass(frozen=True)
class _Panel:
    """A histogram.

    Attributes:
        title: The title of the axes.
        xlabel: A name of the values.
        unit: A name of the things that have these values.
        values: One value for each live item.
        discrete: Whether the values are integers; the histogram then begins at 0, or at the least
            value if that is negative.
        mean: Whether to mark the mean.
    """

    title: str
    xlabel: str
    unit: str
    values: Shaped[np.ndarray, " N"]
    discrete: bool = False
    mean: bool = True


@dataclasses.dataclass(frozen=True)
class _Map:
    """The ages of items by slot, or of steps by environment and index in its ring.

    Attributes:
        age: The age in each slot, ``[R, N]``: the number of items or steps added to its ring since;
            0 if that is unknown.
        live: A mask of the slots with an item or a step that can be drawn or read, ``[R, N]``.
        cursor: The slot that each ring writes next, ``[R]``; empty if there is no such slot.
        unit: ``items`` or ``steps``.
        ring: A name of the rows; empty if there is only one.
        has_ages: Whether ages are known.
    """

    age: Int[np.ndarray, "R N"]
    live: Bool[np.ndarray, "R N"]
    cursor: Shaped[np.ndarray, " R"]
    unit: str
    ring: str
    has_ages: bool = True


def plot(buffer: Any) -> "Figure":
    """Draws the contents of a buffer.

    The map at the top shows the age of the item in each slot by color. An age is the number of
    items that were added since; for trajectories, the number of steps of the same environment.
    Lines mark the slots that are written next. Below it are histograms of ages and, if the buffer
    has them, of priorities, scores, use counts and staleness over the items, or windows, that can
    be drawn now. In large buffers neighboring slots share a point of the map. With an evictor of
    your own whose occupancy does not keep the order of items, ages are unknown, and the map only
    shows which slots hold an item.

    Args:
        buffer: An ``ItemBuffer``, ``TrajectoryBuffer``, ``Queue`` or ``Mixture``.

    Returns:
        A ``matplotlib.figure.Figure``, which a notebook shows; ``savefig`` writes it to a file.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the buffer is traced, was donated, or is a stack of several buffers.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 100, sampler=jaxbuf.Prioritized())
        >>> buffer = buffer.add(jnp.ones(140), priority=jnp.linspace(0, 1, 140))
        >>> figure = jaxbuf.plot(buffer)
        >>> [axes.get_title() for axes in figure.axes if axes.get_title()]
        ['age by slot', 'ages', 'priorities']
    """
    try:
        module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "plot needs matplotlib; install it with `pip install matplotlib`"
        ) from error
    parts = [*_parts(buffer).values()]
    maps = [_map(part) for part in parts]
    panels = [_panels(part, ages) for part, ages in zip(parts, maps, strict=True)]
    heights = [2.4 + 2.2 * _rows(histograms) for histograms in panels]

    class NotebookFigure(module.Figure):
        """A figure that a notebook shows even if matplotlib was not set up for notebooks."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    figure: Any = NotebookFigure(figsize=(10.0, sum(heights)), layout="constrained")
    subfigures: Any = figure.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)
    for subfigure, part, ages, histograms in zip(
        subfigures[:, 0], parts, maps, panels, strict=True
    ):
        _draw_buffer(subfigure, part, ages, histograms)
    return figure


def distributions(buffer: Any) -> dict[str, Shaped[np.ndarray, " N"]]:
    """Returns the values of the items that ``plot`` draws histograms of, where there are any."""
    return {
        name + panel.title: panel.values
        for name, part in _parts(buffer).items()
        for panel in _panels(part, _map(part))
        if panel.values.size
    }


def _parts(buffer: Any, name: str = "") -> dict[str, Any]:
    """Returns the buffer, or the parts of a mixture, by what their metrics are prefixed with.

    Raises:
        ValueError: If one cannot be drawn.
    """
    mixture: Any = as_buffer(buffer)
    if not mixture.members:
        return {name: _checked(buffer)}
    labels = mixture.names or range(len(mixture.members))
    parts = zip(labels, mixture.members, strict=True)
    return {k: v for label, part in parts for k, v in _parts(part, f"{name}{label}/").items()}


def _checked(buffer: Any) -> Any:
    """Returns a buffer with its leaves as jax arrays.

    Raises:
        ValueError: If it cannot be drawn.
    """
    if not owns_items(buffer):
        shard = "jax.tree.map(lambda leaf: leaf[0], buffer.shards)"
        advice = {Sharded: f"; plot one shard: {shard}", Hosted: "; plot buffer.buffer"}
        raise ValueError(
            f"buffer is {checks.kind_of(buffer)}; expected an ItemBuffer, TrajectoryBuffer, Queue "
            f"or Mixture{advice.get(type(buffer), '')}"
        )
    leaves = jax.tree.leaves(buffer)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise ValueError(
            "buffer is traced, so it has no numbers yet; return it from the jitted function and "
            "plot what comes back"
        )
    if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        raise ValueError("buffer holds other things than arrays; expected one with contents")
    check_not_donated(leaves, "buffer")
    if buffer.counters.ndim != 1:
        raise ValueError(
            f"buffer is {buffer.counters.shape[0]} stacked ones; plot one of them: "
            "jax.tree.map(lambda leaf: leaf[0], buffer)"
        )
    return trees.on_device(buffer)


def _map(buffer: Any) -> _Map:
    """Returns the ages of items by slot, or of steps by environment and index in its ring."""
    if buffer.num_envs:
        rings = buffer.rings
        cursor, num_steps = (np.asarray(x).astype(np.int64) for x in (rings.cursor, rings.held))
        age = (cursor[:, None] - 1 - np.arange(buffer.length)) % buffer.length  # [E, T]
        return _Map(age, age < num_steps[:, None], cursor, "steps", "environment")
    live, occupancy = _live(buffer), buffer.occupancy.places
    age, cursor = occupancy.item_ages(), occupancy.next_place
    cursor = np.zeros(0) if cursor is None else np.asarray(cursor)[None]
    shown = np.zeros(live.shape) if age is None else np.asarray(age)
    return _Map(shown.astype(np.int64)[None], live[None], cursor, "items", "", age is not None)


def _panels(buffer: Any, ages: _Map) -> list[_Panel]:
    """Returns the histograms that the buffer has values for."""
    panels: list[_Panel] = []
    if ages.has_ages:
        # Evenly spread, or in two groups after others have retired: no mean describes them.
        label, values = f"age ({ages.unit} added since)", ages.age[ages.live]
        panels.append(_Panel("ages", label, ages.unit, values, discrete=True, mean=False))
    live, unit, numbers = _live(buffer), buffer.drawn_unit, buffer.by_slot()
    if "priority" in numbers:
        priority = np.asarray(numbers["priority"])
        panels.append(_Panel("priorities", "priority", unit, priority[live]))
    if "score" in numbers:
        score = np.asarray(numbers["score"])[live]
        finite = np.isfinite(score)
        others = f" ({score.size - finite.sum()} infinite left out)" if not finite.all() else ""
        panels.append(_Panel("scores", f"score{others}", unit, score[finite]))
    if buffer.freshness is not None:
        uses = np.asarray(buffer.freshness_state.uses)[: live.size]
        if buffer.freshness.max_use is not None or uses[live].any():
            panels.append(_Panel("use counts", "times used", unit, uses[live], discrete=True))
        versions = np.asarray(buffer.freshness_state.versions)[: live.size].astype(np.int64)
        behind = int(buffer.freshness_state.version) - versions
        if buffer.freshness.max_staleness is not None or behind[live].any():
            panels.append(_Panel("staleness", "versions behind", unit, behind[live], discrete=True))
    return panels


def _live(buffer: Any) -> Bool[np.ndarray, " N"]:
    """Returns a mask of the slots that can be drawn."""
    occupancy = buffer.occupancy
    return np.asarray(occupancy.live(jnp.arange(occupancy.num_slots, dtype=jnp.int32)))


def _rows(panels: list[_Panel]) -> int:
    return math.ceil(len(panels) / _PANELS_PER_ROW)


def _draw_buffer(figure: Any, buffer: Any, ages: _Map, panels: list[_Panel]) -> None:
    size = f"{int(buffer.size):,} of {buffer.capacity:,} {buffer.unit}"
    figure.suptitle(f"{type(buffer).__name__}: {size}")
    columns = min(max(len(panels), 1), _PANELS_PER_ROW)
    grid: Any = figure.add_gridspec(1 + _rows(panels), columns)
    _draw_map(figure, figure.add_subplot(grid[0, :]), ages)
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(grid[1 + i // columns, i % columns])
        _draw_panel(axes, panel)


def _draw_map(figure: Any, axes: Any, ages: _Map) -> None:
    rings, length = ages.age.shape
    age, share = _binned(ages.age, ages.live)
    image = axes.imshow(
        np.ma.masked_where(share == 0, age),
        # A point is pale if only some of its slots are live.
        alpha=np.where(share > 0, 0.25 + 0.75 * share, 0.0),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis_r",
        vmin=0,
        vmax=max(float(age.max(initial=0.0)), 1.0),
        extent=(0, length, rings - 0.5, -0.5),
    )
    if ages.has_ages:
        bar = figure.colorbar(image, ax=axes, label="age", pad=0.01)
        bar.ax.yaxis.get_major_locator().set_params(integer=True)
    step = math.ceil(rings / _ROWS)
    for top, cursor in enumerate(ages.cursor.tolist()):
        if top % step == 0:
            axes.plot([cursor] * 2, [top - 0.5, top + step - 0.5], color="tab:red", lw=2)
    if len(ages.cursor):
        axes.plot([], [], color="tab:red", lw=2, label="written next")
        # Above the axes, where it covers nothing.
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.0,
            frameon=False,
            fontsize="small",
        )
    shown = "age" if ages.has_ages else ages.unit
    axes.set(
        title=f"{shown} by place" if ages.ring else f"{shown} by slot",
        xlabel="place in the ring" if ages.ring else "slot",
        ylabel=ages.ring,
        xlim=(0, length),
        ylim=(rings - 0.5, -0.5),
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    if rings == 1:
        axes.set_yticks([])
    else:
        axes.yaxis.get_major_locator().set_params(integer=True)


def _draw_panel(axes: Any, panel: _Panel) -> None:
    values = panel.values
    axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.unit)
    if values.size == 0:
        text = f"no {panel.unit}"
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
        return
    low, high = float(values.min()), float(values.max())
    positive = values[values > 0]
    bins = min(_BINS, 2 * math.ceil(math.sqrt(values.size)))
    if panel.discrete:
        # An item may be of a later version than the learner's, and then has a negative staleness.
        begin = min(0.0, low)
        span = high + 1 - begin
        width = math.ceil(span / _BINS)
        # Bars of one integer are centered on it; wider ones begin at their first integer.
        shift = 0.5 if width == 1 else 0.0
        edges = begin + width * np.arange(math.ceil(span / width) + 1) - shift
    elif low >= 0 and positive.size and high > 1000 * float(positive.min()):
        edges = np.geomspace(float(positive.min()), high, bins + 1)
        axes.set_xscale("log")
        if positive.size < values.size:
            axes.set_xlabel(f"{panel.xlabel} ({values.size - positive.size:,} of 0 left out)")
    else:
        edges = (
            np.linspace(low, high, bins + 1) if high > low else np.asarray([low - 0.5, low + 0.5])
        )
    count, edges = np.histogram(values, edges)
    axes.stairs(count, edges, fill=True, alpha=0.8)
    if panel.mean:
        mean = float(values.mean())
        label = f"mean {mean:,.0f}" if abs(mean) >= 1000 else f"mean {mean:.3g}"
        axes.axvline(mean, color="tab:red", lw=1, label=label)
        axes.legend(loc="upper right", frameon=False, fontsize="small")
    # Room above the bars for the legend.
    axes.set_ylim(0, 1.25 * float(count.max()))
    axes.yaxis.get_major_locator().set_params(integer=True)
    if panel.discrete:
        axes.set_xlim(edges[0], edges[-1])
        axes.xaxis.get_major_locator().set_params(integer=True)


def _binned(
    age: Int[np.ndarray, "R N"], live: Bool[np.ndarray, "R N"]
) -> tuple[Float[np.ndarray, "r n"], Float[np.ndarray, "r n"]]:
    """Returns the mean age at each point of the map, and the share of its slots that are live."""
    rows, columns = (
        np.linspace(0, size, min(size, most) + 1).astype(int)[:-1]
        for size, most in zip(age.shape, (_ROWS, _COLUMNS), strict=True)
    )

    def total(values: Float[np.ndarray, "R N"]) -> Float[np.ndarray, "r n"]:
        return np.add.reduceat(np.add.reduceat(values, columns, axis=1), rows, axis=0)

    count = total(live.astype(np.float64))
    mean = total(np.where(live, age, 0).astype(np.float64)) / np.maximum(count, 1)
    return mean, count / total(np.ones(age.shape))
