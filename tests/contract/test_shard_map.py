"""Every operation of every strategy inside `jax.shard_map`, with the checks it makes by default.

Each device works on a buffer of its own. Whether a program passes the checks shows when it is
traced, for which no devices are needed; some are run as well, on four.
"""

import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxbuf.core.versions import vary_with
from tests import operations

DEVICES = 4
AXIS = "devices"

# Some that change a buffer, of each kind.
RUN = [
    ("prioritized", "add"),
    ("prioritized", "update_priority"),
    ("windows-prioritized", "add"),
    ("queue", "take"),
]

# Some whose arguments may vary where the buffer does not.
CHANGES = ("update_priority", "update_score", "set_field")


def on_every_device(function, mesh):
    """``function`` of trees whose leaves have an axis of devices in front."""

    def on_one(*args):
        out = function(*jax.tree.map(lambda leaf: leaf[0], args))
        return jax.tree.map(lambda leaf: leaf[None], out)

    spec = PartitionSpec(AXIS)
    return jax.shard_map(on_one, mesh=mesh, in_specs=spec, out_specs=spec)


def check(function, args):
    """Traces a function with an axis of devices in front, without devices."""
    mesh = AbstractMesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((DEVICES, *leaf.shape), leaf.dtype), args)
    with jax.debug_key_reuse(True), jax.transfer_guard("disallow"):
        return jax.jit(on_every_device(function, mesh)).trace(*args).out_info


def test_reuse_and_transfers_are_found_when_a_program_is_traced():
    def reuses(key):
        return jax.random.normal(key) + jax.random.uniform(key)

    def sends(key):
        with jax.ensure_compile_time_eval():
            return jnp.add(np.arange(3), key.shape[0])

    with pytest.raises(jax.errors.KeyReuseError):
        check(reuses, (jax.random.key(0),))
    with pytest.raises(jax.errors.JaxRuntimeError):
        check(sends, (jnp.zeros(3),))


@pytest.mark.parametrize(("name", "what"), operations.pairs(operations.CASES))
def test_every_operation_passes_the_checks_and_uses_no_key_twice(name, what):
    """It sends nothing to a device unasked either."""
    _, function = operations.OPERATIONS[what]
    args = (*operations.abstract(name), jnp.float32(1), jax.random.key(0))
    out = jax.tree.leaves(check(function, args))
    assert out
    assert all(leaf.shape[0] == DEVICES for leaf in out)


SHARED_BUFFER = [
    (*case, "buffer")
    for case in operations.CASES
    if case[1].startswith("sample") or case[1] in CHANGES
]
SHARED_KEY = [(*case, "key") for case in operations.CASES if case[1].startswith("sample")]


@pytest.mark.parametrize(
    ("name", "what", "shared"),
    operations.pairs(SHARED_BUFFER)
    + operations.quick(
        SHARED_KEY, [(name, "sample", "key") for name in ("prioritized", "windows-prioritized")]
    ),
)
def test_devices_may_share_the_buffer_or_the_key(name, what, shared):
    """Once a device changes the buffer that they share, it has one of its own."""
    _, function = operations.OPERATIONS[what]
    buffer, sample = operations.abstract(name)
    key = jax.random.key(0)

    def of_device(number):
        mine = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (buffer, sample))
        own = jax.random.fold_in(key, number[0])
        if shared == "key":
            mine, own = vary_with(mine, number), key
        out = function(*mine, vary_with(jnp.float32(1), number), own)
        return jax.tree.map(lambda leaf: vary_with(leaf, number)[None], out)

    spec = PartitionSpec(AXIS)
    mesh = AbstractMesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=spec)
    out = jax.eval_shape(mapped, jax.ShapeDtypeStruct((DEVICES,), jnp.int32))
    assert all(leaf.shape[0] == DEVICES for leaf in jax.tree.leaves(out))


def test_four_devices_do_what_one_does():
    """In a process of its own, since the number of devices is fixed when jax begins."""
    devices = {"JAX_NUM_CPU_DEVICES": str(DEVICES)}
    subprocess.run(
        [sys.executable, "-m", __name__], env=os.environ | devices, check=True, timeout=300
    )


def main():
    mesh = jax.make_mesh((DEVICES,), (AXIS,))
    for name, what in RUN:
        _, function = operations.OPERATIONS[what]
        rng = np.random.default_rng(0)
        args = [
            (*operations.concrete(name, scale), jnp.float32(scale), jax.random.key(scale))
            for scale in rng.permutation(DEVICES) + 1
        ]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *args)
        stacked = jax.device_put(stacked, NamedSharding(mesh, PartitionSpec(AXIS)))
        out = jax.jit(on_every_device(function, mesh))(*stacked)
        alone = [jax.jit(function)(*each) for each in args]
        chex.assert_trees_all_equal(out, jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone))


if __name__ == "__main__":
    main()
