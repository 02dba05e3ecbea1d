"""Python processes that run at the same time, each with some CPU devices."""

import contextlib
import os
import socket
import subprocess
import sys


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(*command, devices=1, alone=False, **options):
    """A Python process that has begun, with so many devices; None lets it choose.

    Programs of several processes are compiled by all of them or by none, so one that is not alone
    keeps none. Of the flags of the tests only the one that changes no results is given: with the
    others, sums depend on the number of devices.
    """
    flags = (
        "--xla_cpu_collective_call_terminate_timeout_seconds=300 "
        "--xla_cpu_parallel_codegen_split_count=1"
    )
    if devices is not None:
        flags += f" --xla_force_host_platform_device_count={devices}"
    given = {"XLA_FLAGS": flags}
    if not alone:
        given["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | given,
        **options,
    )


def run_processes(*commands, devices=1):
    """The output of Python processes that run at the same time, each with so many devices."""
    alone = len(commands) == 1
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(start(*command, devices=devices, alone=alone))
            for command in commands
        ]
        try:
            out = [process.communicate(timeout=300)[0] for process in processes]
        finally:
            # Each is then waited for, so that nothing of it is left for a later test.
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes)
    return out
