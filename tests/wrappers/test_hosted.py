"""`Hosted`: a buffer on a CPU device, called from Python, with batches sent elsewhere."""

import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxbuf
from jaxbuf.core import program, versions

DEVICES = 4
CAPACITY = 64


def rows(first, count=16):
    number = np.arange(first, first + count, dtype=np.float32)
    return {"obs": np.stack([number] * 3, axis=1), "reward": number}


def prioritized():
    return jaxbuf.ItemBuffer.create(
        {"obs": jnp.zeros(3), "reward": jnp.float32(0)},
        CAPACITY,
        sampler=jaxbuf.Prioritized(),
        freshness=jaxbuf.Freshness(max_use=3, max_staleness=4),
    )


def windows():
    return jaxbuf.TrajectoryBuffer.create(
        {"obs": jnp.zeros(3), "reward": jnp.float32(0)},
        2,
        CAPACITY // 2,
        sequence_length=3,
        sampler=jaxbuf.Prioritized(),
    )


def hosted(make=prioritized, **options):
    return jaxbuf.Hosted.create(make, **options)


def same(sample, other):
    # Copies: some versions of jax do not donate an array that NumPy still has a view of.
    chex.assert_trees_all_equal(*(jax.tree.map(np.array, tree) for tree in (sample, other)))


def test_it_does_what_the_buffer_does_bit_for_bit_and_in_place():
    plain, buffer = prioritized(), hosted()
    place = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(buffer.buffer.data)]
    rng = np.random.default_rng(0)
    for i in range(8):
        plain, buffer = jaxbuf.add(plain, rows(16 * i)), jaxbuf.add(buffer, rows(16 * i))
        weighing = {"beta": 0.4, "normalize": None if i % 2 else "buffer"}
        batch, ours = (jaxbuf.sample(x, jax.random.key(i), 24, **weighing) for x in (plain, buffer))
        same(batch, ours)
        priority = rng.random(24, np.float32)
        plain = jaxbuf.update_priority(plain, batch.slots, priority)
        buffer = jaxbuf.update_priority(buffer, ours.slots, priority)
        same(plain, buffer.buffer)
        assert (buffer.size, buffer.capacity) == (plain.size, plain.capacity)
        assert [bool(x.can_sample(n)) for x in (plain, buffer) for n in (1, 2000)] == [
            True,
            False,
        ] * 2
    same(plain.metrics(), buffer.metrics())
    assert place == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(buffer.buffer.data)]


def test_options_of_the_buffer_inside_are_passed_on():
    mixture = hosted(lambda: jaxbuf.Mixture.create([prioritized(), prioritized()], [1, 1]))
    mixture = jaxbuf.add(mixture, rows(0), part=1, mask=np.arange(16) < 4)
    batch = jaxbuf.sample(mixture, jax.random.key(0), 8)
    assert batch.valid.tolist() == [False] * 4 + [True] * 4
    steps = jax.tree.map(lambda leaf: leaf.reshape(2, 8, *leaf.shape[1:]), rows(0))
    trajectories = jaxbuf.add(hosted(windows), steps)
    batch = jaxbuf.sample(trajectories, jax.random.key(0), 8, sequence_length=5)
    assert batch.data["obs"].shape == (8, 5, 3)
    with pytest.raises(ValueError, match="score was given"):
        jaxbuf.add(hosted(), rows(0), score=np.zeros(16, np.float32))


def test_without_donating_the_old_one_stays():
    buffer = jaxbuf.add(hosted(), rows(0))
    larger = jaxbuf.add(buffer, rows(16), donate=False)
    batch = jaxbuf.sample(buffer, jax.random.key(0), 4)
    other = jaxbuf.update_priority(buffer, batch.slots, jnp.full(4, 9.0), donate=False)
    assert (buffer.size, larger.size, other.size) == (16, 32, 16)
    assert buffer.metrics()["priority_max"] != other.metrics()["priority_max"]
    jaxbuf.add(buffer, rows(0))
    with pytest.raises(ValueError, match="buffer was donated"):
        buffer.sample(jax.random.key(0), 4)
    empty = hosted()
    empty.insert(rows(0))
    with pytest.raises(ValueError, match="buffer was donated"):
        empty.insert(rows(0))


def test_it_is_not_called_while_something_is_traced():
    buffer = jaxbuf.add(hosted(), rows(0))
    key = jax.random.key(0)
    slots, one = buffer.sample(key, 4).slots, jax.tree.map(lambda x: x[None], rows(0))
    for call, name in (
        (lambda: jax.jit(lambda buffer: buffer.sample(key, 4))(buffer), "sample"),
        # A constant of the program would be the same batch each time.
        (
            lambda: jax.jit(lambda x: x + buffer.sample(key, 4).data["reward"])(jnp.zeros(4)),
            "sample",
        ),
        (lambda: jax.vmap(lambda items: jaxbuf.add(buffer, items))(one), "add"),
        (lambda: jax.lax.scan(lambda x, _: (x, buffer.metrics()), 0, length=2), "metrics"),
        (lambda: jax.jit(buffer.get)(slots), "get"),
        (lambda: jax.jit(lambda slots: buffer.apply(lambda b: (b, slots)))(slots), "apply"),
    ):
        message = f"{name} was called inside.*is called from Python; sample before your jitted step"
        with pytest.raises(ValueError, match=message):
            call()
    assert buffer.size == 16


def test_a_process_without_a_cpu_device_is_told_how_to_get_one(monkeypatch):
    def none(backend=None):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", none)
    with pytest.raises(ValueError, match='JAX_PLATFORMS="cuda,cpu"'):
        hosted()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (prioritized(), {}, "make is .*ItemBuffer.*; expected a function that makes a buffer"),
        (lambda: 3, {}, "what make returns is .*; expected a buffer"),
        (lambda: jaxbuf.Queue.create(jnp.float32(0), 4), {}, "Queue, which has no method sample"),
        (lambda: hosted(), {}, "make returns a Hosted buffer"),
        (prioritized, {"to": "gpu"}, "to is .*; expected a device"),
        (prioritized, {"to": jax.devices}, "to is .*; expected a device"),
    ],
)
def test_what_cannot_be_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        jaxbuf.Hosted.create(make, **options)


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    buffer = jaxbuf.add(hosted(), rows(0, 40))
    jaxbuf.save(tmp_path / "whole", {"replay": buffer})
    # Shapes are enough, and it is on its own device nevertheless.
    like = jax.eval_shape(lambda: {"replay": hosted()})
    loaded = jaxbuf.load(tmp_path / "whole", like=like)["replay"]
    same(buffer.buffer, loaded.buffer)
    assert all(leaf.committed for leaf in jax.tree.leaves(loaded))
    for each in (buffer, loaded):
        assert jaxbuf.add(each, rows(40), donate=False).size == 56
    same(*(each.sample(jax.random.key(3), 8) for each in (buffer, loaded)))
    # The buffer inside can be saved by itself, for use without ``Hosted`` as well.
    jaxbuf.save(tmp_path / "inner", buffer.buffer)
    same(jaxbuf.load(tmp_path / "inner", like=prioritized()), buffer.buffer)
    inner = loaded.replace(buffer=jaxbuf.load(tmp_path / "inner", like=loaded.buffer))
    same(*(each.sample(jax.random.key(3), 8).data for each in (inner, loaded)))


def test_it_says_where_it_is():
    lines = str(jaxbuf.add(hosted(), rows(0))).splitlines()
    device = jax.devices()[0]
    assert lines[0] == f"Hosted: on {device}, batches go to {device}"
    assert lines[1].startswith("  ItemBuffer: ")


def test_programs_are_compiled_for_the_device_of_the_buffer(monkeypatch):
    """Pretends that the default backend is a GPU."""
    option = "xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    on_cpu = dict([option]) if versions.takes_option(*option) else None
    assert on_cpu or jax.__version_info__ < (0, 10)
    assert jaxbuf.compiler_options() == on_cpu
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert jaxbuf.compiler_options() is None
    buffer = hosted()
    assert program.platform_of(buffer) == "cpu"
    assert jaxbuf.compiler_options(buffer) == on_cpu
    # A committed array decides, wherever it stands among others.
    there = jax.device_put(jnp.zeros(2), jax.devices()[0])
    assert program.platform_of((np.zeros(2), {"a": jnp.zeros(2), "b": there})) == "cpu"
    assert program.platform_of((np.zeros(2), 3)) == "gpu"

    given = []
    jit = jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda *args, **options: given.append(options) or jit(*args, **options)
    )

    @program.program()
    def size(self):
        return self.size

    assert size(buffer.buffer) == 0
    assert [options["compiler_options"] for options in given] == [jaxbuf.compiler_options(buffer)]


@pytest.mark.slow
def test_batches_go_to_several_devices():
    """In a process of its own, since the number of devices is fixed when jax begins."""
    devices = {"JAX_NUM_CPU_DEVICES": str(DEVICES)}
    subprocess.run(
        [sys.executable, "-m", __name__], env=os.environ | devices, check=True, timeout=300
    )


def main():
    cpu, *others = jax.devices()
    mesh = jax.make_mesh((DEVICES,), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    for to in (others[1], split, NamedSharding(mesh, PartitionSpec())):
        plain, buffer = prioritized(), hosted(to=to)
        plain = jaxbuf.add(plain, rows(0))
        # Items, keys and priorities come from other devices, from one or from all of them.
        buffer = jaxbuf.add(buffer, jax.device_put(rows(0), split))
        batch = jaxbuf.sample(plain, jax.random.key(0), 8)
        ours = jaxbuf.sample(buffer, jax.device_put(jax.random.key(0), others[0]), 8)
        same(batch, ours)
        for leaf in jax.tree.leaves(ours):
            wanted = {to} if isinstance(to, jax.Device) else to.device_set
            assert leaf.sharding.device_set == wanted, leaf.sharding
        td_error = jax.jit(lambda data: data["reward"] + 1.0)(ours.data)
        plain = jaxbuf.update_priority(plain, batch.slots, batch.data["reward"] + 1.0)
        buffer = jaxbuf.update_priority(buffer, ours.slots, td_error)
        same(plain, buffer.buffer)
        assert all(leaf.devices() == {cpu} for leaf in jax.tree.leaves(buffer))
        for normalize in ("batch", "buffer"):
            weights = jaxbuf.importance_weights(buffer, ours, 0.4, normalize)
            expected = jaxbuf.importance_weights(plain, batch, 0.4, normalize)
            np.testing.assert_allclose(weights, expected, rtol=1e-6)
    draws_while_another_device_works(others[1])
    buffer = hosted(to=split)
    with pytest.raises(ValueError, match="the batch has 6 rows, which the sharding"):
        jaxbuf.sample(buffer, jax.random.key(0), 6)
    with pytest.raises(ValueError, match="batches can be split by their rows only"):
        hosted(to=NamedSharding(mesh, PartitionSpec("data", None)))


def draws_while_another_device_works(device):
    buffer = jaxbuf.add(hosted(to=device), rows(0))

    @jax.jit
    def train(reward):
        # On so few numbers XLA:CPU would work in the thread that calls it.
        many = jnp.repeat(reward, 2_500)
        many = jax.lax.fori_loop(0, 20_000, lambda _, x: jnp.sin(x) + 1.0, many)
        return many[::2_500]

    key = jax.random.key(0)
    batch = jaxbuf.sample(buffer, key, 8)
    work = train.lower(batch.data["reward"]).compile()
    td_error = work(batch.data["reward"])
    following = jax.block_until_ready(jaxbuf.sample(buffer, key, 8))
    assert not td_error.is_ready(), "sample waited for the learner's step"
    buffer = jaxbuf.update_priority(buffer, batch.slots, td_error)
    same(following.slots, batch.slots)
    assert np.isfinite(buffer.metrics()["priority_max"])


if __name__ == "__main__":
    main()


def test_it_works_inside_the_mesh_of_a_program():
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("data",))

    def use(buffer):
        buffer = jaxbuf.add(buffer, rows(0))
        batch = jaxbuf.sample(buffer, jax.random.key(0), 4)
        buffer = jaxbuf.update_priority(buffer, batch.slots, batch.data["reward"])
        assert (int(buffer.size), int(buffer.clear().size)) == (16, 0)
        return batch.data["reward"].tolist()

    want, before = use(hosted()), hosted()
    with jax.set_mesh(mesh):
        assert use(hosted()) == want
        assert use(before) == want
