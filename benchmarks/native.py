"""jaxbuf with its kernels in C++, as a contestant beside jaxbuf without."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness import NATIVE, Contestant, Operation, Unavailable


class NativeContestant:
    """Another contestant, in all of whose work the kernels are in use."""

    def __init__(self, build: Callable[[], Contestant]):
        """Builds the other contestant; `Unavailable` where the kernels cannot be compiled."""
        from jaxbuf.core import native

        self._using = native.using_native
        try:
            self._contestant = self._within(build)()
        except RuntimeError as error:
            raise Unavailable(f"{NATIVE} kernels: {error}") from error

    def verify(self) -> None:
        """See `Contestant`."""
        self._within(self._contestant.verify)()

    def operations(self) -> Mapping[str, Operation]:
        """Those of the other."""
        return {name: self._inside(one) for name, one in self._contestant.operations().items()}

    def facts(self) -> Mapping[str, str]:
        """Those of the other."""
        return self._within(self._contestant.facts)()

    def _inside(self, operation: Operation) -> Operation:
        return Operation(
            run=self._within(operation.run),
            per_call=operation.per_call,
            prepare=self._within(operation.prepare),
            floor=operation.floor,
            memory=operation.memory and self._within(operation.memory),
        )

    def _within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._using():
                return function(*args)

        return call
