"""The folder of a run: its checkpoint, with everything that resuming needs."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxbuf.examples import _cli

SAVES = 10

State = TypeVar("State")


class RunError(Exception):
    """Something about the folder that the user can put right; the message says how."""


def save_is_due(chunk: int, chunks: int) -> bool:
    """Whether to save after a chunk: ``SAVES`` times in a run, and at its end."""
    return (chunk + 1) % max(chunks // SAVES, 1) == 0 or chunk + 1 == chunks


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where one run of one example keeps its files.

    A checkpoint holds the whole training state (arrays and PRNG keys) and a record of plain
    values: the configuration, which the arrays do not carry, and what was logged so far.

    Args:
        path: The folder.
        example: Name of the example it belongs to. A folder of another one is not touched.
    """

    path: Path
    example: str

    @property
    def checkpoints(self) -> Path:
        """The folder of the newest checkpoint."""
        return self.path.resolve() / "checkpoint"

    @property
    def log_table(self) -> Path:
        """The metrics of a run that logs them, as a CSV."""
        return self.path / "log.csv"

    @property
    def log_events(self) -> Path:
        """The same for TensorBoard, a folder."""
        return self.path / "tensorboard"

    def begin(self) -> None:
        """Make the folder, and empty it of an earlier run of this example.

        Raises:
            RunError: When there is something else in it, or it cannot be written.
        """
        self._check_ours()
        try:
            for folder in (self.checkpoints, self.log_events):
                shutil.rmtree(folder, ignore_errors=True)
            self.log_table.unlink(missing_ok=True)
            self.path.mkdir(parents=True, exist_ok=True)
            self._marker.write_text(json.dumps({"example": self.example}) + "\n")
        except OSError as error:
            raise RunError(
                f"cannot write to {self.path} ({error.strerror}); choose another --out"
            ) from error

    def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
        """Write a checkpoint, then remove the one before it.

        Waits until all is on disk: the caller may donate ``state`` next.
        """
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        with ocp.CheckpointManager(self.checkpoints, options=options) as manager:
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
                ),
            )
            manager.wait_until_finished()

    def load_record(self) -> dict[str, Any]:
        """The record of the newest checkpoint.

        Raises:
            RunError: When there is no checkpoint.
        """
        self._check_ours()
        return self._restore(record=ocp.args.JsonRestore()).record

    def go_on(self, given: dict[str, Any], amount: str = "steps") -> dict[str, Any]:
        """The record of the newest checkpoint, its configuration with what may be asked for now.

        A run that was trained to its end can go on, too, for it may have been interrupted before
        it told how that went.

        Args:
            given: Options given together with ``--resume``.
            amount: Name of the one that says how much to train, of which there may be more.

        Raises:
            RunError: When there is no checkpoint, another option differs, or less is asked for than
                is done.
        """
        record = self.load_record()
        # JSON has no tuples.
        saved = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in record["config"].items()
        }
        for name, value in given.items():
            if name != amount and value != saved[name]:
                raise RunError(
                    f"the run in {self.path} has {_cli.flag(name)} {saved[name]}, not {value}; "
                    "leave the option out, or start another run with another --out"
                )
        if given.get(amount, saved[amount]) != saved[amount] and record["step"] >= given[amount]:
            raise RunError(
                f"the run in {self.path} has done its {record['step']} {amount}; ask for more with "
                f"{_cli.flag(amount)}"
            )
        return {**record, "config": {**saved, **given}}

    def load_state(self, like: State) -> State:
        """The training state of the newest checkpoint.

        Args:
            like: A state of the same structure, shapes and dtypes: arrays or
                ``jax.ShapeDtypeStruct``s. Static fields are taken from it.
        """
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), like
        )
        return self._restore(state=ocp.args.StandardRestore(abstract)).state

    def how_to_go_on(self, unit: str = "step") -> str:
        """A sentence for somebody whose run, counted in a unit, was interrupted."""
        try:
            step = self.load_record()["step"]
        except RunError:
            return "there is no checkpoint yet, so start anew"
        return f"go on from {unit} {step} with --resume"

    def _restore(self, **args: Any) -> Any:
        nothing = RunError(f"there is no checkpoint in {self.path}; start without --resume")
        if not self.checkpoints.is_dir():
            raise nothing
        with ocp.CheckpointManager(self.checkpoints) as manager:
            step = manager.latest_step()
            if step is None:
                raise nothing
            return manager.restore(step, args=ocp.args.Composite(**args))

    @property
    def _marker(self) -> Path:
        return self.path / "run.json"

    def _check_ours(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise RunError(f"{self.path} is a file; choose another --out")
        if not any(self.path.iterdir()):
            return
        try:
            example = json.loads(self._marker.read_text())["example"]
        except (OSError, ValueError, KeyError, TypeError):
            example = None
        if example != self.example:
            raise RunError(
                f"{self.path} holds other files than those of {self.example}; choose another --out"
            )
