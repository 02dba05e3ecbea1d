"""The peer's side of [`benchmarks.peer_process`][]: answers requests until its input ends."""

import json
import os
import sys
import traceback


def serve(peer: object) -> None:
    """Calls the public methods of `peer` as asked on standard input.

    Whatever a library prints goes to standard error, so that it is not taken for an answer.

    Args:
        peer: Its methods take keyword arguments and return what JSON can hold.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                answer = {"result": _call(peer, json.loads(line))}
            except Exception:
                answer = {"error": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _call(peer: object, request: dict) -> object:
    name = request["call"]
    if name.startswith("_"):
        raise ValueError(f"{name} is not public")
    return getattr(peer, name)(**request["arguments"])
