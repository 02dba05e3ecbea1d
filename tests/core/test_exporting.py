"""Steps that are exported, or compiled, in one process and run in another one."""

import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.export
import jax.numpy as jnp
import pytest

import jaxbuf
from jaxbuf.core.segment_tree import width_for, widths_of
from tests.programs import exported


def run(name, folder, **environment):
    program = (
        "import pathlib, sys, jax, jaxbuf;"
        # Importing the library must leave the choice of devices to the program.
        "jax.config.update('jax_num_cpu_devices', 1);"
        "from tests.programs import exported;"
        f"exported.{name}(pathlib.Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_step_of_each_buffer_runs_in_another_process(tmp_path):
    pytest.importorskip("flatbuffers")
    exported.write(tmp_path)
    run("run", tmp_path)


@pytest.mark.slow
def test_a_program_compiled_ahead_finds_its_kernels_in_another_process(tmp_path):
    # JAX cannot serialize programs that it has from its cache.
    run("compile_ahead", tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")
    run("run_compiled", tmp_path)


def test_a_buffer_is_laid_out_for_another_platform():
    item, priorities = jnp.float32(0), jnp.arange(1.0, 301.0)
    buffer = jaxbuf.ItemBuffer.create(item, 300, sampler=jaxbuf.Prioritized(alpha=1.0))
    buffer = buffer.add(priorities, priority=priorities)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), buffer)
    here, key = width_for("cpu"), jax.random.key(0)
    for tree in (buffer, stacked, {"buffer": buffer, "other": jnp.zeros(3)}):
        shapes = jax.eval_shape(lambda tree=tree: tree)
        for platform in ("gpu", "tpu"):
            moved = jaxbuf.for_platform(tree, platform)
            assert widths_of(moved) == {width_for(platform)}
            expected = jaxbuf.for_platform(shapes, platform)
            chex.assert_trees_all_equal_shapes_and_dtypes(moved, expected)
            back = jaxbuf.for_platform(moved, "cpu")
            assert widths_of(back) == {here}
            chex.assert_trees_all_equal(back, tree)
    moved = jaxbuf.for_platform(buffer, "tpu")
    chex.assert_trees_all_close(moved.sample(key, 64), buffer.sample(key, 64), rtol=1e-6)
    advice = jaxbuf.explain_memory(jaxbuf.add, moved, priorities).advice
    mismatch = "jaxbuf.for_platform(buffer, 'cpu')" if width_for("tpu") != here else ""
    assert mismatch in advice
    assert not jaxbuf.explain_memory(jaxbuf.add, buffer, priorities).advice
    with pytest.raises(ValueError, match="platform is 'tpus'; expected one of cpu, gpu, cuda"):
        jaxbuf.for_platform(buffer, "tpus")


def test_a_configuration_that_no_other_process_can_find_is_named():
    pytest.importorskip("flatbuffers")
    diversity = jaxbuf.Diversity(field=lambda item: item)
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, diversity=diversity)
    program = jax.export.export(jax.jit(lambda buffer: buffer.size))(buffer)
    with pytest.raises(ValueError, match=r"field of Diversity is <function .*cannot be exported"):
        program.serialize()


def test_what_is_exported_for_other_platforms_has_no_kernels_of_this_one():
    args = exported.arguments(exported.BUFFERS["Prioritized"]())
    checks = jaxbuf.export_checks()
    for platform, has in (("cpu", jaxbuf.native_available()), ("cuda", False)):
        program = jax.export.export(
            jax.jit(exported.step), platforms=(platform,), disabled_checks=checks
        )(*args)
        assert ("jaxbuf_" in program.mlir_module()) == has
