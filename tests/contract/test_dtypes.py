"""Each dtype that an item may have, in everything that holds items; all others are refused.

The exchange between ranks has `tests/mpi/test_dtypes.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from tests import operations
from tests.models.leaves import KEYS, every_kind

MAKE = {
    "items": lambda item: jaxbuf.ItemBuffer.create(item, 4, sampler=jaxbuf.Prioritized()),
    "rings": lambda item: jaxbuf.TrajectoryBuffer.create(item, 4, 2, sequence_length=2),
    "queue": lambda item: jaxbuf.Queue.create(item, 4),
    "mixture": lambda item: jaxbuf.Mixture.create([MAKE["items"](item)], (1.0,)),
    "hosted": lambda item: jaxbuf.Hosted.create(lambda: MAKE["items"](item)),
    "sharded": lambda item: jaxbuf.Sharded.create(
        lambda: MAKE["items"](item), jax.make_mesh((1,), ("d",)), "d"
    ),
}


def bits(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


@pytest.mark.parametrize("kind", operations.quick(MAKE, {"mixture"}))
def test_a_buffer_holds_saves_and_draws_what_was_added(kind, tmp_path):
    with jax.enable_x64(True):
        rows = every_kind(4) | {"at": jnp.arange(4)}
        buffer = MAKE[kind](jax.tree.map(lambda leaf: leaf[0], rows))
        buffer = jaxbuf.add(buffer, rows, **{"part": 0} if kind == "mixture" else {})
        jaxbuf.save(tmp_path / "saved", buffer)
        testing.assert_holds(buffer, rows)
        loaded = jaxbuf.load(tmp_path / "saved", buffer)
        testing.assert_holds(loaded, rows)
        if kind == "queue":
            _, batch = jaxbuf.take(loaded, 4)
        elif kind == "rings":
            batch = jaxbuf.add(loaded, rows).sample(jax.random.key(0), 4)
        else:
            batch = jaxbuf.sample(loaded, jax.random.key(0), 4)
        at = np.asarray(batch.data["at"])
        for name, leaf in rows.items():
            assert batch.data[name].dtype == leaf.dtype
            np.testing.assert_array_equal(bits(batch.data[name]), bits(leaf)[at], err_msg=name)


def test_a_store_holds_all_but_keys(tmp_path):
    with jax.enable_x64(True):
        rows = every_kind(4)
        item = jax.tree.map(lambda leaf: leaf[0], rows)
        with pytest.raises(ValueError, match=r"example\['rbg'\] is a PRNG key; store its"):
            jaxbuf.Store(tmp_path, item)
        rows, item = ({k: v for k, v in x.items() if k not in KEYS} for x in (rows, item))
        with jaxbuf.Store(tmp_path / "store", item) as store:
            store.append(rows)
        with jaxbuf.Store(tmp_path / "store", item, mode="r") as store:
            for name, leaf in store.read([1, 3, 0]).items():
                assert leaf.dtype == rows[name].dtype
                np.testing.assert_array_equal(leaf, bits(rows[name])[[1, 3, 0]])
            testing.assert_holds(store.load_into(jaxbuf.ItemBuffer.create(item, 4)), rows)


OTHERS = ["U3", "S3", "O", "V2", "M8[s]", "m8[s]", [("x", "i4")], jax.dtypes.float0]
# Older versions of JAX lack these.
OTHERS += [name for name in ("int1", "uint1", "float6_e2m3fn") if hasattr(jnp, name)]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_others_are_refused_by_leaf(dtype, tmp_path):
    leaf = jax.ShapeDtypeStruct((2,), getattr(jnp, str(dtype), dtype))
    for create in (*MAKE.values(), lambda item: jaxbuf.Store(tmp_path, item)):
        with pytest.raises(ValueError, match=r"example\['leaf'\] has dtype .*; expected bool, int"):
            create({"leaf": leaf, "reward": np.float32(0)})
