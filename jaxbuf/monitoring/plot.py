"""A buffer as a picture: where its items lie, how old they are, and what is known of them."""

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

from jaxbuf.core.donation import check_there
from jaxbuf.occupancy.ranking import Ranking
from jaxbuf.occupancy.subset import Subset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A picture has about this many points across and down: more slots share one.
_COLUMNS, _ROWS, _BINS = 512, 64, 40
_PANELS_PER_ROW = 3


@dataclasses.dataclass(frozen=True)
class _Panel:
    """A histogram.

    Attributes:
        title: What is counted.
        xlabel: What its values are.
        values: One for each live item.
        whole: Whether the values are whole numbers.
    """

    title: str
    xlabel: str
    values: NDArray[Any]
    whole: bool = False


@dataclasses.dataclass(frozen=True)
class _Map:
    """What lies where.

    Attributes:
        age: Of what is in each place, ``[R, N]``: steps or items that came to its ring since.
        live: Which places hold something that can be drawn or read, ``[R, N]``.
        position: Where each ring writes next, ``[R]``; empty if there is no such place.
        unit: What lies there.
        ring: What a row is.
    """

    age: NDArray[Any]
    live: NDArray[Any]
    position: NDArray[Any]
    unit: str
    ring: str


def plot(buffer: Any) -> "Figure":
    """Draw what a buffer holds.

    On top, where its items lie: the color of a place tells the age of what is there, counted in
    items that came after it (in steps of the same ring, for trajectories), and lines mark where
    the next ones are written. Below, as far as there are any, the distributions of ages, of
    priorities, of scores, of use counts and of staleness over what can be drawn now: items, or
    windows. Of large buffers neighboring slots share a point of the picture.

    Args:
        buffer: An ``ItemBuffer``, ``TrajectoryBuffer``, ``Queue`` or ``Mixture``.

    Returns:
        A ``matplotlib.figure.Figure``, which a notebook shows; ``savefig`` writes it to a file.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there are no numbers to draw: inside ``jit``, after donation, or of several
            stacked buffers.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 100, sampler=jaxbuf.Prioritized())
        >>> buffer = buffer.add(jnp.ones(140), priority=jnp.linspace(0, 1, 140))
        >>> figure = jaxbuf.plot(buffer)
        >>> [axes.get_title() for axes in figure.axes if axes.get_title()]
        ['where items lie', 'ages', 'priorities']
    """
    try:
        module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "plot needs matplotlib; install it with `pip install matplotlib`"
        ) from error
    parts = _parts(buffer)
    for part in parts:
        _check(part)
    looks = [(_title(part), _map(part), _panels(part)) for part in parts]
    heights = [2.4 + 2.2 * _rows(panels) for _, _, panels in looks]

    class Shown(module.Figure):
        """A figure that a notebook shows, whether or not it has set up matplotlib."""

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
    unit = "steps" if hasattr(buffer, "num_envs") else "items"
    return f"{type(buffer).__name__}: {int(buffer.size):,} of {buffer.capacity:,} {unit}"


def _parts(buffer: Any) -> list[Any]:
    """The buffer, or those that a mixture consists of."""
    if hasattr(buffer, "parts"):
        return [inner for part in buffer.parts for inner in _parts(part)]
    return [buffer]


def _check(buffer: Any) -> None:
    if not hasattr(buffer, "occupancy") or not hasattr(buffer, "counters"):
        raise ValueError(f"buffer is a {type(buffer).__name__}; expected a buffer of jaxbuf")
    leaves = jax.tree.leaves(buffer)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise ValueError(
            "buffer is traced, so it has no numbers yet; return it from the jitted function and "
            "plot what comes back"
        )
    if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        raise ValueError("buffer holds other things than arrays; expected one with contents")
    check_there(leaves, "buffer")
    if buffer.counters.ndim != 1:
        raise ValueError(
            f"buffer is {buffer.counters.shape[0]} stacked ones; plot one of them: "
            "jax.tree.map(lambda leaf: leaf[0], buffer)"
        )


def _map(buffer: Any) -> _Map:
    """Where its items, or steps, lie."""
    if hasattr(buffer, "num_envs"):
        counters = np.asarray(buffer.rings.counters).astype(np.int64)
        position, held = counters[:, 0], counters[:, 2]
        place = np.arange(buffer.length)[None]
        age = (position[:, None] - 1 - place) % buffer.length
        return _Map(age, age < held[:, None], position, "steps", "environment")
    live, age = _live(buffer), _ages(buffer)
    inner = _inner(buffer.occupancy)
    position = np.asarray(inner.position)[None] if hasattr(inner, "position") else np.zeros(0)
    return _Map(age[None], live[None], position, "items", "")


def _panels(buffer: Any) -> list[_Panel]:
    """What there are numbers of."""
    where = _map(buffer)
    found = [_Panel("ages", f"{where.unit} that came since", where.age[where.live], whole=True)]
    if not hasattr(buffer, "sampler"):
        return found
    live = _live(buffer)
    sampler, state = buffer.sampler, buffer.sampler_state
    # What draws from the newest items keeps the state of the sampler that draws the others.
    sampler = getattr(sampler, "base", sampler)
    if hasattr(sampler, "priority") and hasattr(state, "leaves"):
        priority = np.asarray(sampler.priority(state.leaves))
        found.append(_Panel("priorities", "priority", priority[live]))
    score = getattr(_inner(buffer.occupancy), "score", None)
    if score is None and hasattr(state, "scores"):
        score = state.scores.leaves
    if score is not None:
        known = np.asarray(score)[live]
        finite = np.isfinite(known)
        others = f" ({known.size - finite.sum()} infinite left out)" if not finite.all() else ""
        found.append(_Panel("scores", f"score{others}", known[finite]))
    if buffer.freshness is not None:
        uses = np.asarray(buffer.freshness_state.uses)[: live.size]
        if buffer.freshness.max_use is not None or uses[live].any():
            found.append(_Panel("use counts", "times used", uses[live], whole=True))
        versions = np.asarray(buffer.freshness_state.versions)[: live.size].astype(np.int64)
        behind = int(buffer.freshness_state.version) - versions
        if buffer.freshness.max_staleness is not None or behind[live].any():
            found.append(_Panel("staleness", "versions behind", behind[live], whole=True))
    return found


def _inner(occupancy: Any) -> Any:
    return occupancy.inner if isinstance(occupancy, Subset) else occupancy


def _live(buffer: Any) -> NDArray[Any]:
    """Which slots hold something that can be drawn."""
    slots = buffer.rings.capacity if hasattr(buffer, "num_envs") else buffer.capacity
    return np.asarray(buffer.occupancy.live(jnp.arange(slots, dtype=jnp.int32)))


def _ages(buffer: Any) -> NDArray[Any]:
    """How many items came after the one in each slot; arbitrary where there is none."""
    inner = _inner(buffer.occupancy)
    slot = np.arange(buffer.capacity)
    if isinstance(inner, Ranking):
        number = np.asarray(inner.generation(jnp.asarray(slot, jnp.int32)))
        return (np.asarray(inner.counters)[0] - np.uint32(1) - number).astype(np.int64)
    if hasattr(inner, "position"):
        return (int(inner.position) - 1 - slot) % buffer.capacity
    return np.zeros(slot.shape, np.int64)


def _rows(panels: list[_Panel]) -> int:
    return math.ceil(len(panels) / _PANELS_PER_ROW)


def _draw(figure: Any, where: _Map, panels: list[_Panel]) -> None:
    columns = min(len(panels), _PANELS_PER_ROW)
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
        # Where only some are left, as after others have retired, the color is pale.
        alpha=np.where(share > 0, 0.25 + 0.75 * share, 0.0),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis_r",
        vmin=0,
        vmax=max(float(age.max(initial=0.0)), 1.0),
        extent=(0, length, rings, 0),
    )
    figure.colorbar(image, ax=axes, label="age", pad=0.01)
    step = math.ceil(rings / _ROWS)
    for top, position in enumerate(where.position.tolist()):
        if top % step == 0:
            axes.plot([position] * 2, [top, top + step], color="tab:red", lw=2)
    if len(where.position):
        axes.plot([], [], color="tab:red", lw=2, label="written next")
        axes.legend(loc="upper right", fontsize="small")
    axes.set(
        title=f"where {where.unit} lie",
        xlabel="place in the ring" if where.ring else "slot",
        ylabel=where.ring,
        xlim=(0, length),
        ylim=(rings, 0),
    )
    if rings == 1:
        axes.set_yticks([])
    else:
        axes.yaxis.get_major_locator().set_params(integer=True)


def _draw_panel(axes: Any, panel: _Panel) -> None:
    values = panel.values
    axes.set(title=panel.title, xlabel=panel.xlabel, ylabel="how many")
    if values.size == 0:
        axes.text(0.5, 0.5, "nothing here", ha="center", va="center", transform=axes.transAxes)
        return
    low, high = float(values.min()), float(values.max())
    bins = min(_BINS, 2 * math.ceil(math.sqrt(values.size)))
    if panel.whole:
        width = max(1, math.ceil((high - low + 1) / _BINS))
        edges = np.arange(low - 0.5, high + 0.5 + width, width)
    elif low > 0 and high > 1000 * low:
        edges = np.geomspace(low, high, bins + 1)
        axes.set_xscale("log")
    else:
        edges = (
            np.linspace(low, high, bins + 1) if high > low else np.asarray([low - 0.5, low + 0.5])
        )
    count, edges = np.histogram(values, edges)
    axes.stairs(count, edges, fill=True, alpha=0.8)
    mean = float(values.mean())
    label = f"mean {mean:,.0f}" if abs(mean) >= 1000 else f"mean {mean:.3g}"
    axes.axvline(mean, color="tab:red", lw=1, label=label)
    axes.legend(loc="best", fontsize="small")
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)
    if panel.whole:
        axes.set_xlim(edges[0] - 0.5, edges[-1] + 0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)


def _binned(age: NDArray[Any], live: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The mean age in each point of the picture, and the share of its places that are live."""
    rows, columns = (
        np.linspace(0, size, min(size, most) + 1).astype(int)[:-1]
        for size, most in zip(age.shape, (_ROWS, _COLUMNS), strict=True)
    )

    def total(values: NDArray[Any]) -> NDArray[Any]:
        return np.add.reduceat(np.add.reduceat(values, columns, axis=1), rows, axis=0)

    count = total(live.astype(np.float64))
    mean = total(np.where(live, age, 0).astype(np.float64)) / np.maximum(count, 1)
    return mean, count / total(np.ones(age.shape))
