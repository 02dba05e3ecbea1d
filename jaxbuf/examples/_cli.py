"""Command lines made from dataclasses, with errors that fit on one line."""

import argparse
import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line that says what to do, and exit status 2.

    Example:
        >>> parser = Parser(prog="demo")
        >>> parser.error("--steps must be at least 1")
        Traceback (most recent call last):
        SystemExit: 2
    """

    def __init__(self, prog: str, description: str = "", epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Print the message on one line of stderr and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


class Kind(NamedTuple):
    """What an option takes.

    Attributes:
        parse: Turns the word of the command line into a value, or raises
            ``argparse.ArgumentTypeError`` with a message that says what is expected.
        metavar: Stands for the word in ``--help``.
    """

    parse: Callable[[str], Any]
    metavar: str


def option(default: Any, kind: Kind, meaning: str) -> Any:
    """A dataclass field that ``add_options`` turns into a command-line option.

    Args:
        default: Its value where nothing else is asked for.
        kind: What it takes.
        meaning: A line for ``--help``.
    """
    return dataclasses.field(default=default, metadata={"kind": kind, "meaning": meaning})


def example_parser(
    example: str, description: str, files: str, config: type[Any], amount: str | None = None
) -> Parser:
    """The parser of an example: its options, ``--out``, and ``--resume`` if its runs can go on.

    Args:
        example: Its name, and that of its folder.
        description: What it does.
        files: What it writes there, a line for each file.
        config: A dataclass of ``option`` fields.
        amount: The one of them that a run that goes on may have more of; None if none can go on.
    """
    epilog = f"files, in runs/{example} or where --out says:\n{files}"
    if amount is not None:
        epilog += "\nA run that is there already is replaced, unless --resume is given."
    parser = Parser(f"python -m jaxbuf.examples.{example}", description, epilog)
    add_options(parser, config)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=Path("runs") / example,
        help="where to write (default: %(default)s)",
    )
    if amount is not None:
        parser.add_argument(
            "--resume",
            action="store_true",
            help="go on from the checkpoint in --out, with its options; "
            f"{flag(amount)} may ask for more",
        )
    return parser


def add_options(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """Add one option for each ``option`` field of a dataclass.

    An option that is not given is absent from the result of parsing, so that what the user asked
    for can be told from a default.
    """
    for field in dataclasses.fields(config):
        kind: Kind = field.metadata["kind"]
        default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        parser.add_argument(
            flag(field.name),
            type=kind.parse,
            metavar=kind.metavar,
            default=argparse.SUPPRESS,
            help=f"{field.metadata['meaning']} (default: {default})",
        )


def flag(name: str) -> str:
    """The option of a field.

    Example:
        >>> flag("batch_size")
        '--batch-size'
    """
    return "--" + name.replace("_", "-")


def integer(low: int, high: int | None = None) -> Kind:
    """Whole numbers from ``low`` up to ``high``.

    Example:
        >>> [integer(1).parse(text) for text in ("64", "100_000", "1e5")]
        [64, 100000, 100000]
    """

    def parse(text: str) -> int:
        value = _to_float(text)
        if not value.is_integer() or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number of at least {low}{_up_to(high)}"
            )
        return int(value)

    return Kind(parse, "N")


def number(low: float, high: float | None = None, *, above: bool = False) -> Kind:
    """Finite numbers from ``low`` (or ``above`` it) up to ``high``."""
    wanted = f"above {low}" if above else f"of at least {low}"

    def parse(text: str) -> float:
        value = _to_float(text)
        is_low = value <= low if above else value < low
        if not math.isfinite(value) or is_low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}{_up_to(high)}")
        return value

    return Kind(parse, "X")


def choice(names: Sequence[str]) -> Kind:
    """One of some names; a near miss is told which one it missed."""

    def parse(text: str) -> str:
        if text not in names:
            near = difflib.get_close_matches(text, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise argparse.ArgumentTypeError(
                f"{text!r} is unknown; {hint}choose one of {', '.join(names)}"
            )
        return text

    return Kind(parse, "NAME")


def choices(names: Sequence[str]) -> Kind:
    """One or more of some names, separated by commas, none of them twice.

    Example:
        >>> choices(("tea", "milk", "sugar")).parse("tea, sugar")
        ('tea', 'sugar')
    """
    one = choice(names)

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(one.parse(part.strip()) for part in text.split(","))
        if len(set(chosen)) < len(chosen):
            raise argparse.ArgumentTypeError(f"{text!r} names one twice; name each once")
        return chosen

    return Kind(parse, "NAME,...")


def _up_to(high: float | None) -> str:
    return "" if high is None else f" and at most {high}"


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
