"""Functions that run as one compiled program when they are called from Python.

Inside a transformation of the caller, such as ``jax.jit`` or ``jax.vmap``, a program is the plain
function. Called from Python it is compiled once for each shape and configuration, so that a call is
one program and not one for each operation on an array. The function checks its arguments itself,
which happens while it is traced. Only what it could not see there is looked at before: the numbers
of NumPy's 64-bit arrays, which JAX would truncate, and whether the buffer was donated. Which of the
arguments these are follows from their classes, and is remembered for them; see ``Entry``.

A program that takes a function of the caller is compiled at each call instead, and then dropped:
the function may be a method of an agent that has learned since, which no comparison would show.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypedDict, TypeVar, Unpack

import jax
import jax.extend.backend
import numpy as np
from jaxtyping import PyTree

from jaxbuf.core import advice, fields, guesses, native, numbers, trees
from jaxbuf.core.donation import check_apart, check_not_donated, check_single, one_leaf
from jaxbuf.core.random import check_key
from jaxbuf.core.segment_tree import using_width, width_for
from jaxbuf.core.slots import Slots
from jaxbuf.core.trees import is_concrete
from jaxbuf.core.types import Dtype, Function
from jaxbuf.core.versions import takes_option, trace_state

P = ParamSpec("P")
R = TypeVar("R")


class About(TypedDict, total=False):
    """The facts that a program must know of its function, each of which may be left out.

    Attributes:
        static: The names of the arguments that must be known when the function is traced.
        by_value: The names of arguments that are static if they are Python integers or strings, as
            all those are that the function takes without naming them.
        dtypes: The dtypes that the numbers of some arguments become.
        infinite: The names of those among them whose numbers may become infinite.
        stored: The names of arguments that are written to the storage of ``self``, or to its field
            ``path`` if there is such an argument, and become what is there.
        buffers: The names of arguments besides ``self`` that are buffers.
        keys: The names of arguments that are PRNG keys.
        keeps: The names of fields that the method neither reads nor changes, if ``self`` has them.
            They do not pass through the program, and a result of the same class has the same
            arrays. May be a function of ``self`` and the arguments by name.
        reads: The names of fields that the method reads and does not change, if ``self`` has them.
            They pass into the program and not out of it, since each array that comes out of one
            takes longer than all that is asked about an argument. The result is a buffer.
        before: Takes ``self`` and the arguments by name, and returns the arguments, after a check
            of numbers that the function itself would not know.
        concerns: The names of arguments without which ``before`` has nothing to do.
        copies: Whether the result has the changed buffer, alone or first of all. A method that is
            called from Python copies what it changes; see ``advice.note_copy``.
        loses: Whether the result may lack some of the arrays that ``self`` has. If ``self`` is
            donated, only arrays are whose memory the result can take.
    """

    static: tuple[str, ...]
    by_value: tuple[str, ...]
    dtypes: Mapping[str, Dtype]
    infinite: tuple[str, ...]
    stored: tuple[str, ...]
    buffers: tuple[str, ...]
    keys: tuple[str, ...]
    keeps: tuple[str, ...] | Callable[[Any, dict[str, Any]], tuple[str, ...]]
    reads: tuple[str, ...]
    before: Callable[[Any, dict[str, Any]], dict[str, Any]]
    concerns: tuple[str, ...]
    copies: bool
    loses: bool


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Copied:
    """The number of bytes of a buffer that a program copies, as a part of its result."""

    nbytes: int


def program(**about: Unpack[About]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that makes a program of a function, or of a method; see ``About``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        made = Program(function, **about)

        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            return made(args, options)

        vars(call)["program"] = made
        return call

    return decorate


class Entry(NamedTuple):
    """The way of a call from Python into a compiled program, as far as its classes say so.

    Attributes:
        program: The program.
        before: That of ``About``, if it has something to do.
        left_out: The names of arguments that are None, as if they had not been passed.
        slots: Those of slots.
        stored: Those of rows for the storage.
        looked: Those of others whose numbers are looked at, each with a function that returns the
            argument as the program takes it.
        functions: Those of arguments that can be called.
        fixed: Those of other static arguments.
        keeps: The names of fields that do not come out of the program, each with what stands for
            it there; see ``About``.
        reads: Those of them that go in.
        platform: The platform of all devices, if they have but one.
        compiled: Returns the jitted function, given whether it donates the buffer, its platform
            and the static arguments.
    """

    program: "Program"
    before: Callable[[Any, dict[str, Any]], dict[str, Any]] | None
    left_out: tuple[str, ...]
    slots: tuple[str, ...]
    stored: tuple[str, ...]
    looked: tuple[tuple[str, Callable[[Any], Any]], ...]
    functions: tuple[str, ...]
    fixed: tuple[str, ...]
    keeps: dict[str, tuple[()]] | Callable[[Any, dict[str, Any]], tuple[str, ...]]
    reads: tuple[str, ...]
    platform: str | None
    compiled: Callable[..., Function]


class OwnPrograms:
    """A buffer that must be called from Python, not inside of ``jax.jit``."""


class Program:
    """A function, and how it runs when it is called from Python.

    Args:
        function: The function; a method if its first argument is ``self``.
        foreign: Whether it is a method of somebody else: any name may stand for ``self``, and the
            value of each argument decides whether it is static.
        **about: The arguments of ``program``.
    """

    def __init__(
        self, function: Function, *, foreign: bool = False, **about: Unpack[About]
    ) -> None:
        first, *others = inspect.signature(function).parameters.values()
        self.function, self.about, self.answered = function, about, guesses.answered(function)
        self.is_method = foreign or first.name == "self"
        named = others if self.is_method else [first, *others]
        self.names = [x.name for x in named if x.kind is x.POSITIONAL_OR_KEYWORD]
        self.defaults = {x.name: x.default for x in named}
        self.required = {x.name for x in named if x.default is x.empty} & {*self.names}
        self.static = set(about.get("static", ()))
        by_value = self.defaults.keys() if foreign else about.get("by_value", ())
        self.traced = self.defaults.keys() - self.static - set(by_value)
        self.stored, self.copies = about.get("stored", ()), about.get("copies", False)
        # Of these, JAX's arrays and floats go into the program without a look at their numbers.
        self.untouched = self.traced - about.get("dtypes", {}).keys() - {*self.stored}
        self.entry = functools.lru_cache(maxsize=256)(self._entry)
        self.compiled = functools.lru_cache(maxsize=1024, typed=True)(self._compile)

    def __call__(
        self, args: tuple[Any, ...], options: dict[str, Any], *, donate: bool | None = None
    ) -> Any:
        """Returns ``function(*args, **options)``.

        Args:
            args: The positional arguments.
            options: The arguments by name.
            donate: Whether a call from Python may overwrite the arrays of the first argument. None
                if the caller did not choose: the method was called, and not the function.

        Raises:
            ValueError: If the first argument of a method was donated, or is a batch of buffers.
        """
        if self.is_method:
            if not args:
                return self.function(**options)  # Python says what is missing.
            alone = isinstance(args[0], OwnPrograms)
        else:
            alone = any(isinstance(x, OwnPrograms) for x in args)
        if alone or trace_state() != OUTSIDE:
            if self.is_method:
                args = (check_single(args[0]), *args[1:])
            return self.answered(*args, **options)
        return self.outside(args, options, donate)

    def outside(
        self,
        args: tuple[Any, ...],
        options: dict[str, Any],
        donate: bool | None,
        entry: Entry | None = None,
    ) -> Any:
        """Does what a call does where nothing is traced; ``entry`` is that of the call, if known.

        In line where it can be: in a loop with an environment, whose code has the caches between
        two calls, each function that a call enters takes a microsecond or two.
        """
        try:
            first: Any = None
            values = args
            if self.is_method:
                first, values = args[0], args[1:]
                counters: Any = getattr(first, "__dict__", {}).get("counters")
                if not is_concrete(type(counters)) or counters.is_deleted():
                    first = check_single(first)
            arguments = dict(zip(self.names, values, strict=False))
            arguments.update(options)
            if entry is None:
                if len(arguments) < len(values) + len(options):
                    return self.function(*args, **options)  # Python says what is wrong.
                kinds = map(type, arguments.values())
                entry = self.entry(type(first), tuple(arguments), *kinds)
            if entry.before is not None:
                given, arguments = arguments, entry.before(first, arguments)
                if given is not arguments:
                    kinds = map(type, arguments.values())
                    entry = self.entry(type(first), tuple(arguments), *kinds)
            for name in entry.left_out:
                del arguments[name]
            for name in entry.slots:
                slots = arguments[name]
                if not (is_concrete(type(slots.index)) and is_concrete(type(slots.generation))):
                    arguments[name] = numbers.narrow(slots, name)
            for name in entry.stored:
                like = functools.partial(_stored_in, first, arguments.get("path"))
                arguments[name] = numbers.narrow(arguments[name], name, like)
            for name, look in entry.looked:
                arguments[name] = look(arguments[name])
            if entry.functions:
                entry = self._anew(entry, arguments)
            keeps = entry.keeps
            if callable(keeps):
                keeps = dict.fromkeys(keeps(first, arguments), ())
            held: dict[str, Any] = {}
            read: dict[str, Any] = {}
            if keeps:
                held, first = vars(first), object.__new__(type(first))
                vars(first).update(held)
                vars(first).update(keeps)
                for name in entry.reads:
                    read[name] = held[name]
            platform = entry.platform
            if platform is None:
                platform = platform_of(one_leaf(first if self.is_method else arguments))
            run = entry.compiled(donate is True, platform, *map(arguments.pop, entry.fixed))
            result = run(first, read, arguments)
            if self.copies and not donate:
                result, copied = result
                if donate is None:
                    advice.note_copy(first, self.function.__name__, copied.nbytes)
            if keeps and type(result) is type(first):
                new = vars(result)  # Nobody else has it.
                for name in keeps:
                    new[name] = held[name]
            return result
        except (TypeError, OverflowError, ValueError, RuntimeError) as error:
            wrong = error
        try:
            self._explain(wrong, args, options, donate)
            raise wrong
        finally:
            del wrong  # It has this frame, which has the buffer.

    def _entry(self, kind: type, names: tuple[str, ...], *kinds: type) -> Entry:
        """Returns how a call enters the program.

        Args:
            kind: The class of ``self``.
            names: The names of the arguments.
            *kinds: Their classes.
        """
        found: dict[str, list[Any]] = collections.defaultdict(list)
        for name, given in zip(names, kinds, strict=True):
            if given is type(None) and self.defaults.get(name) is None:
                found["left_out"].append(name)
            elif name in self.untouched and (is_concrete(given) or issubclass(given, float)):
                pass
            elif name in self.untouched and issubclass(given, Slots):
                found["slots"].append(name)
            elif name in self.stored:
                found["stored"].append(name)
            elif name in self.traced or not self._is_static(name, given):
                found["looked"].append((name, self._look(name)))
            elif issubclass(given, Callable):
                found["functions"].append(name)
            else:
                found["fixed"].append(name)
                if issubclass(given, np.integer):
                    found["looked"].append((name, int))
        left_out = tuple(found["left_out"])
        concerns = self.about.get("concerns")
        checks = concerns is None or not ({*names} - {*left_out}).isdisjoint(concerns)
        fixed = tuple(sorted(found["fixed"]))
        held = getattr(kind, "__dataclass_fields__", ())
        keeps, reads = self.about.get("keeps", ()), self.about.get("reads", ())
        reads = tuple(name for name in reads if name in held)
        if not callable(keeps):
            keeps = {name: () for name in (*keeps, *reads) if name in held}
        return Entry(
            program=self,
            before=self.about.get("before") if checks else None,
            left_out=left_out,
            slots=tuple(found["slots"]),
            stored=tuple(found["stored"]),
            looked=tuple(found["looked"]),
            functions=tuple(found["functions"]),
            fixed=fixed,
            keeps=keeps,
            reads=reads,
            platform=_only_platform(),
            compiled=functools.partial(self.compiled, kind, fixed),
        )

    def _is_static(self, name: str, kind: type) -> bool:
        """Returns whether an argument that is not traced for its name is static."""
        return name in self.static or issubclass(kind, int | str | np.integer | Callable)

    def _look(self, name: str) -> Callable[[Any], Any]:
        """Returns a function that returns an argument as the compiled function takes it.

        It copies NumPy's arrays, and raises a ``ValueError`` if a number does not fit what it
        becomes, or if a buffer was donated.
        """
        dtype = self.about.get("dtypes", {}).get(name)
        if dtype is not None:
            infinite = name in self.about.get("infinite", ())
            return functools.partial(numbers.convert, name=name, dtype=dtype, infinite=infinite)
        if name in self.about.get("keys", ()):
            return check_key
        if name in self.about.get("buffers", ()):
            return lambda value: None if value is None else check_single(value)
        return functools.partial(numbers.narrow, name=name)

    def _anew(self, entry: Entry, arguments: dict[str, Any]) -> Entry:
        """Returns an entry for functions, which are static unless they are pytrees.

        It compiles anew, for a function is the same object, or an equal one, after what it reads
        has changed.
        """
        static: list[str] = []
        for name in entry.functions:
            if name in self.static or jax.tree_util.all_leaves([arguments[name]]):
                static.append(name)
            else:
                arguments[name] = numbers.narrow(arguments[name], name)
        if not static:
            return entry
        fixed = (*entry.fixed, *static)
        return entry._replace(fixed=fixed, compiled=functools.partial(self._compile, None, fixed))

    def _compile(
        self,
        kind: type | None,
        names: tuple[str, ...],
        donate: bool,
        platform: str,
        *values: Any,
    ) -> Function:
        """Returns a new jitted form for a class, static arguments and a platform."""
        del kind  # JAX might take the program of another class for this one's; see ``trees.alike``.
        fixed = dict(zip(names, values, strict=True))

        def run(first: Any, read: dict[str, Any], traced: dict[str, Any]) -> Any:
            if self.is_method:
                check_single(first)  # Whether it is a batch: outside, only its class was looked at.
            for name in self.stored:
                if name in traced:
                    advice.note_shapes(first, traced[name], self.function.__name__)
            if read:
                first = trees.updated(first, **read)
            args = (first,) if self.is_method else ()
            # Trees that it creates lie where the buffer does.
            with using_width(width_for(platform)), native.called_from_python(platform == "cpu"):
                result = self.function(*args, **traced, **fixed)
            if read:
                result = trees.updated(result, **dict.fromkeys(read, ()))
            if not self.copies or donate:
                return result
            return result, _Copied(_copied_bytes(first, result))

        run.__name__ = run.__qualname__ = self.function.__name__
        options = _options(platform)
        if donate and self.about.get("loses"):
            return _donating_what_fits(run, options)
        return jax.jit(run, donate_argnums=0 if donate else None, compiler_options=options)

    def _explain(
        self,
        error: Exception,
        args: tuple[Any, ...],
        options: dict[str, Any],
        donate: bool | None,
    ) -> None:
        """Raises a better error than one of JAX's or XLA's, if there is one."""
        if isinstance(error, ValueError):
            _forget_frames(error)
            if "donate" in str(error):
                self._check_memory(args, options, donate)
            # It speaks of the 32 bits of what was traced.
            if not ("has dtype" in str(error) and numbers.has_wide((args, options))):
                return
        elif isinstance(error, RuntimeError):
            self._check_memory(args, options, donate)
            return
        # JAX names what is not an array by its place here; the function knows a better name.
        try:
            inspect.signature(self.function).bind(*args, **options)
        except TypeError:
            self.answered(*args, **options)
        jax.eval_shape(lambda: self.function(*args, **options))

    def _check_memory(
        self, args: tuple[Any, ...], options: dict[str, Any], donate: bool | None
    ) -> None:
        """Checks what XLA refuses: arrays that are gone, or that a donated buffer shares."""
        # An array was donated, but not the one that was looked at.
        check_not_donated((args, options), "buffer")
        if donate:
            check_apart(args[0], dict(zip(self.names, args[1:], strict=False)) | options)


def compiler_options(*arrays: PyTree) -> dict[str, str] | None:
    """Returns options of ``jax.jit`` with which programs that work on buffers run fast.

    These programs are many tiny kernels in a row: handing each to a thread pool, as XLA:CPU does by
    default, costs more than the kernels do. ``jaxbuf.add``, ``jaxbuf.sample`` and the other
    operations are compiled like this; for your own steps pass it to the outermost ``jax.jit``, the
    only one that takes options.

    Args:
        arrays: Arguments of the program, such as a buffer. They determine its device: the one
            that they are committed to, or else the one that they are on. Without arguments it is
            that of the default backend.

    Returns:
        The value to pass as ``compiler_options``; None if the program does not run on a CPU, or
            this version of XLA has no such option.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> def step(buffer, items, key):
        ...     buffer = buffer.add(items)
        ...     return buffer, buffer.sample(key, 4)
        >>> step = jax.jit(step, donate_argnums=0, compiler_options=jaxbuf.compiler_options())
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8)
        >>> buffer, batch = step(buffer, jnp.arange(5), jax.random.key(0))
        >>> int(buffer.size), batch.data.shape
        (5, (4,))
    """
    return _options(platform_of(arrays))


def platform_of(arrays: PyTree) -> str:
    """Returns the platform of the device that runs a program called with these arrays."""
    if trees.is_concrete(type(arrays)):
        return _platform(arrays)
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
    first = next((leaf for leaf in leaves if leaf.committed), leaves[0] if leaves else None)
    return jax.default_backend() if first is None else _platform(first)


def _platform(array: jax.Array) -> str:
    # Faster than the hash by which a cache of shardings would find it.
    return next(iter(array.sharding.device_set)).platform


@functools.cache
def _only_platform() -> str | None:
    """Returns the platform of all devices, if it is "cpu"; to ask an array takes longer."""
    return "cpu" if list(jax.extend.backend.backends()) == ["cpu"] else None


def is_outside() -> bool:
    """Returns True if nothing is being traced."""
    return trace_state() == OUTSIDE


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Returns a context without the mesh of ``jax.set_mesh``, for arrays that are elsewhere."""
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


def _forget_frames(error: Exception) -> None:
    """Removes JAX's note that it has hidden frames of a program that the caller did not write."""
    notes = getattr(error, "__notes__", [])
    notes[:] = [note for note in notes if "JAX has removed its internal frames" not in note]


def _stored_in(first: Any, path: object) -> PyTree:
    """Returns the storage of a buffer, or its field ``path``."""
    storage = getattr(first, "storage", getattr(first, "data", ()))
    return fields.find(storage, path) if isinstance(path, str) else storage


def _options(platform: str) -> dict[str, str] | None:
    fast = ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")
    return dict([fast]) if platform == "cpu" and takes_option(*fast) else None


def _copied_bytes(before: Any, result: Any) -> int:
    """Returns the size of the arrays of a changed buffer that are not those from before."""
    same = {id(leaf) for leaf in jax.tree.leaves(before)}
    leaves = jax.tree.leaves(result[0] if type(result) is tuple else result)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if id(leaf) not in same)


def _donating_what_fits(run: Function, options: dict[str, str] | None) -> Function:
    """Returns a jitted function that donates those arrays whose memory its result can take.

    JAX warns of each other array that is donated, although nobody can do anything about it.
    """
    traceable = jax.jit(run)

    @functools.lru_cache
    def compiled(structure: Any, fits: tuple[bool, ...]) -> Function:
        def merged(kept: list[Any], donated: list[Any], *others: Any) -> Any:
            groups = iter(kept), iter(donated)
            leaves = [next(groups[fit]) for fit in fits]
            return traceable(jax.tree.unflatten(structure, leaves), *others)

        merged.__name__ = merged.__qualname__ = run.__name__
        return jax.jit(merged, donate_argnums=1, compiler_options=options)

    def call(first: Any, *others: Any) -> Any:
        result = jax.tree.leaves(jax.eval_shape(traceable, first, *others))
        room = collections.Counter((leaf.shape, leaf.dtype) for leaf in result)
        leaves, structure = jax.tree.flatten(first)
        groups: tuple[list[Any], list[Any]] = ([], [])
        fits: list[bool] = []
        for leaf in leaves:
            kind = (leaf.shape, leaf.dtype)
            fits.append(room[kind] > 0)
            room[kind] -= 1
            groups[fits[-1]].append(leaf)
        return compiled(structure, tuple(fits))(*groups, *others)

    return call


with jax.ensure_compile_time_eval():
    OUTSIDE = trace_state()
