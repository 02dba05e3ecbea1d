#!/bin/sh
# Installs mpi4py and mpi4jax into .venv, for the MPI whose compiler $MPICC names. Without MPICC that
# is MPICH, which comes as a wheel.
set -e

run=.venv/bin/python
install="$run -m pip install --quiet --disable-pip-version-check --no-input"

fail() {
  echo "$1" >&2
  echo "To go on without MPI: make test MPI=0 (the MPI tests are then skipped)." >&2
  exit 1
}

# What is here may be built for another MPI.
$run -m pip uninstall --quiet --yes mpi4jax mpi4py mpich 2>/dev/null || true
if [ -n "$MPICC" ]; then
  compiler=$(command -v "$MPICC") ||
    fail "MPICC=$MPICC is no command here. Unset it to use the MPI that pip installs."
  mpi4py="--no-cache-dir --no-binary mpi4py mpi4py"
else
  echo "installing MPI (mpich)"
  $install mpich || fail "mpich was not installed: the messages above say why."
  compiler=$PWD/.venv/bin/mpicc
  mpi4py=mpi4py
fi

echo '#include <vector>' | "$compiler" -x c++ -fsyntax-only - ||
  fail "mpi4jax cannot be built: there is no working C++ compiler (on Debian and Ubuntu: apt install g++)."
headers=$($run -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -e "$headers/Python.h" ] ||
  fail "mpi4jax cannot be built: $headers/Python.h is missing (on Debian and Ubuntu: apt install python3-dev)."

# mpi4jax builds a CUDA bridge as soon as it sees an nvcc, with or without the headers for it. A
# folder without headers turns the bridge off.
cuda=$PWD/scripts
for path in "$CUDA_ROOT" "$CUDA_PATH"; do
  [ -e "$path/include/cuda_runtime.h" ] && cuda=$path
done

# mpi4jax is tied to one MPI by its path, so pip's cache is not for it.
echo "installing mpi4py and building mpi4jax with $compiler (a minute; some minutes with MPICC)"
{
  # Older versions of pip have no --group.
  $install --upgrade 'pip>=25.1' &&
    $install --group mpi-build &&
    MPICC=$compiler $install $mpi4py &&
    CUDA_PATH=$cuda MPI4JAX_BUILD_MPICC=$compiler $install --no-build-isolation --no-cache-dir mpi4jax &&
    $run -c 'import mpi4jax'
} || fail "mpi4jax was not built: the messages above say what it missed."
