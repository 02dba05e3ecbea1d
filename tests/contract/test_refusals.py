"""Public functions refuse illegal arguments with clear errors, and lose nothing by it.

In each call of ``tests.calls`` each argument is replaced by each value that is not legal there.
Whatever follows is one of our own errors, which names the argument and says what is expected; and
of all that was passed in nothing has changed or is gone.
"""

import re
import traceback
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

import jaxbuf
from tests.calls import CALLS, HOSTILE, KINDS, THINGS

PACKAGE = str(Path(jaxbuf.__file__).parent)


def fault(name, argument, value):
    """Describes how a call mishandles an illegal argument; "" if it refuses it."""
    legal = {other: legal for other, (legal, _) in CALLS[name].arguments.items()}
    try:
        CALLS[name].function(**legal | {argument: value})
    except Exception as error:
        text = str(error)
        what = f"{type(error).__name__}: {text}"
        if not isinstance(error, ValueError | TypeError):
            return f"another error, {what}"
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE):
            return f"somebody else's error, {what}"
        if not re.search(rf"\b{argument}\b", text):
            return f"an error that does not name the argument, {what}"
        if not re.search(KINDS[CALLS[name].arguments[argument][1]][1], text):
            return f"an error that does not say what is expected of its kind, {what}"
        return ""
    return "taken"


def faults(name):
    """Returns the number of values that a call was given, and how it mishandled some."""
    given = [
        (argument, hostile)
        for argument, (_, kind) in CALLS[name].arguments.items()
        for hostile in HOSTILE
        if hostile not in KINDS[kind][0]
    ]
    found = {
        (argument, hostile): fault(name, argument, HOSTILE[hostile]) for argument, hostile in given
    }
    return len(given), {key: what for key, what in found.items() if what}


def arrays():
    return jax.tree.map(lambda x: np.asarray(x).copy(), jax.tree.leaves(vars(THINGS)))


BEFORE = arrays()


@pytest.mark.parametrize("name", list(CALLS))
def test_what_cannot_be_taken_is_refused_in_words_and_nothing_is_lost(name):
    given, wrong = faults(name)
    assert given
    assert not wrong
    chex.assert_trees_all_equal(arrays(), BEFORE)


@pytest.mark.parametrize("name", [name for name in CALLS if not CALLS[name].consumes])
def test_the_legal_arguments_of_each_call_are_legal(name):
    def made():
        CALLS[name].function(
            **{other: legal for other, (legal, _) in CALLS[name].arguments.items()}
        )

    if CALLS[name].host:
        made()
    else:
        jax.eval_shape(made)
