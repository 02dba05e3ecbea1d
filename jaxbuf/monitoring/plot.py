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
from numpy.typing import NDArray

from jaxbuf.buffers.buffer import as_buffer
from jaxbuf.buffers.created import is_created
from jaxbuf.core import checks, trees
from jaxbuf.core.donation import check_not_donated
from jaxbuf.wrappers.hosted import Hosted
from jaxbuf.wrappers.sharded.sharded import Sharded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The most points across and down a map, and the most bars of a histogram: more slots share one.
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
    values: NDArray[Any]
    discrete: bool = False
    mean: bool = True


@dataclasses.dataclass(frozen=True)
class _Map:
    """The ages of items by slot, or of steps by environment and place.

    Attributes:
        age: Age in each place, ``[R, N]``: the number of items or steps added to its ring since; 0
            if that is unknown.
        live: Which places hold something that can be drawn or read, ``[R, N]``.
        position: The place that each ring writes next, ``[R]``; empty if there is no such place.
        unit: ``items`` or ``steps``.
        ring: A name of the rows; empty if there is only one.
        known: Whether ages are known.
    """

    age: NDArray[Any]
    live: NDArray[Any]
    position: NDArray[Any]
    unit: str
    ring: str
    known: bool = True


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
    parts = [_checked(part) for part in _parts(buffer)]
    looks = [(_title(part), _map(part), _panels(part)) for part in parts]
    heights = [2.4 + 2.2 * _rows(panels) for _, _, panels in looks]

    class Shown(module.Figure):
        """A figure that a notebook shows even if matplotlib was not set up for notebooks."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    figure: Any = Shown(figsize=(10.0, sum(heights)), layout="constrained")
    places: Any = figure.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)
    for place, (title, where, panels) in zip(places[:, 0], looks, strict=True):
        place.suptitle(title)
        _draw(place, where, panels)
    return figure


def _title(buffer: Any) -> str:
    size, most = int(buffer.size), buffer.capacity
    return f"{type(buffer).__name__}: {size:,} of {most:,} {buffer.unit}"


def _parts(buffer: Any) -> list[Any]:
    """Returns the buffer, or the parts of a mixture."""
    return [one for part in as_buffer(buffer).members for one in _parts(part)] or [buffer]


def _checked(buffer: Any) -> Any:
    """Returns a buffer with its leaves as jax arrays.

    Raises:
        ValueError: If it cannot be drawn.
    """
    if not is_created(buffer):
        one = "jax.tree.map(lambda leaf: leaf[0], buffer.shards)"
        advice = {Sharded: f"; plot one shard: {one}", Hosted: "; plot buffer.buffer"}
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
    """Returns the ages of items by slot, or of steps by environment and place."""
    if buffer.num_envs:
        rings = buffer.rings
        position, held = (np.asarray(x).astype(np.int64) for x in (rings.cursor, rings.held))
        place = np.arange(buffer.length)[None]
        age = (position[:, None] - 1 - place) % buffer.length
        return _Map(age, age < held[:, None], position, "steps", "environment")
    live, places = _live(buffer), buffer.occupancy.places
    age = places.item_ages()
    position = np.zeros(0) if places.next_place is None else np.asarray(places.next_place)[None]
    known = age is not None
    shown = np.asarray(age).astype(np.int64) if known else np.zeros(live.shape, np.int64)
    return _Map(shown[None], live[None], position, "items", "", known)


def _panels(buffer: Any) -> list[_Panel]:
    """Returns the histograms that the buffer has values for."""
    where = _map(buffer)
    # Ages are spread evenly, or in two groups after others have retired: no mean describes them.
    label = f"age ({where.unit} added since)"
    ages = where.age[where.live]
    found = [_Panel("ages", label, where.unit, ages, discrete=True, mean=False)]
    found = found if where.known else []
    live, unit, numbers = _live(buffer), buffer.drawn, buffer.by_slot()
    if "priority" in numbers:
        priority = np.asarray(numbers["priority"])
        found.append(_Panel("priorities", "priority", unit, priority[live]))
    if "score" in numbers:
        known = np.asarray(numbers["score"])[live]
        finite = np.isfinite(known)
        others = f" ({known.size - finite.sum()} infinite left out)" if not finite.all() else ""
        found.append(_Panel("scores", f"score{others}", unit, known[finite]))
    if buffer.freshness is not None:
        uses = np.asarray(buffer.freshness_state.uses)[: live.size]
        if buffer.freshness.max_use is not None or uses[live].any():
            found.append(_Panel("use counts", "times used", unit, uses[live], discrete=True))
        versions = np.asarray(buffer.freshness_state.versions)[: live.size].astype(np.int64)
        behind = int(buffer.freshness_state.version) - versions
        if buffer.freshness.max_staleness is not None or behind[live].any():
            found.append(_Panel("staleness", "versions behind", unit, behind[live], discrete=True))
    return found


def _live(buffer: Any) -> NDArray[Any]:
    """Returns a mask of the slots that can be drawn."""
    occupancy = buffer.occupancy
    return np.asarray(occupancy.live(jnp.arange(occupancy.num_slots, dtype=jnp.int32)))


def _rows(panels: list[_Panel]) -> int:
    return math.ceil(len(panels) / _PANELS_PER_ROW)


def _draw(figure: Any, where: _Map, panels: list[_Panel]) -> None:
    columns = min(max(len(panels), 1), _PANELS_PER_ROW)
    grid: Any = figure.add_gridspec(1 + _rows(panels), columns)
    _draw_map(figure, figure.add_subplot(grid[0, :]), where)
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(grid[1 + i // columns, i % columns])
        _draw_panel(axes, panel)


def _draw_map(figure: Any, axes: Any, where: _Map) -> None:
    rings, length = where.age.shape
    age, share = _binned(where.age, where.live)
    image = axes.imshow(
        np.ma.masked_where(share == 0, age),
        # Points of which only some slots are live, as after others have retired, are pale.
        alpha=np.where(share > 0, 0.25 + 0.75 * share, 0.0),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis_r",
        vmin=0,
        vmax=max(float(age.max(initial=0.0)), 1.0),
        extent=(0, length, rings - 0.5, -0.5),
    )
    if where.known:
        bar = figure.colorbar(image, ax=axes, label="age", pad=0.01)
        bar.ax.yaxis.get_major_locator().set_params(integer=True)
    step = math.ceil(rings / _ROWS)
    for top, position in enumerate(where.position.tolist()):
        if top % step == 0:
            axes.plot([position] * 2, [top - 0.5, top + step - 0.5], color="tab:red", lw=2)
    if len(where.position):
        axes.plot([], [], color="tab:red", lw=2, label="written next")
        # Above the axes, where it covers nothing.
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.0,
            frameon=False,
            fontsize="small",
        )
    what = "age" if where.known else where.unit
    axes.set(
        title=f"{what} by place" if where.ring else f"{what} by slot",
        xlabel="place in the ring" if where.ring else "slot",
        ylabel=where.ring,
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
        first = min(0.0, low)
        span = high + 1 - first
        width = math.ceil(span / _BINS)
        # Bars of one integer are centered on it; wider ones begin at their first integer.
        shift = 0.5 if width == 1 else 0.0
        edges = first + width * np.arange(math.ceil(span / width) + 1) - shift
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


def _binned(age: NDArray[Any], live: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the mean age at each point of the map, and the share of its places that are live."""
    rows, columns = (
        np.linspace(0, size, min(size, most) + 1).astype(int)[:-1]
        for size, most in zip(age.shape, (_ROWS, _COLUMNS), strict=True)
    )

    def total(values: NDArray[Any]) -> NDArray[Any]:
        return np.add.reduceat(np.add.reduceat(values, columns, axis=1), rows, axis=0)

    count = total(live.astype(np.float64))
    mean = total(np.where(live, age, 0).astype(np.float64)) / np.maximum(count, 1)
    return mean, count / total(np.ones(age.shape))
