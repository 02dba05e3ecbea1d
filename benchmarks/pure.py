"""jaxbuf without its kernels in C++, as a contestant beside jaxbuf as it is installed."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness import Contestant, Operation, Unavailable


class PureContestant:
    """Another contestant, in all of whose work the kernels are not used."""

    def __init__(self, build: Callable[[], Contestant]):
        """Builds the other contestant; `Unavailable` where there are no kernels to do without."""
        from jaxbuf.core import native

        if not native.native_available():
            raise Unavailable("jaxbuf is pure as it is: it was installed without a C++ compiler")
        self._using = native.using_native
        self._contestant = self._within(build)()

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
        )

    def _within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._using(False):
                return function(*args)

        return call
