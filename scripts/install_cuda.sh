#!/bin/sh
# Installs jax's compiler for NVIDIA GPUs, of the CUDA that $1 names, once. It lives in .venv-cuda:
# elsewhere jax would look for a GPU.
set -e

[ -e ".venv-cuda/.installed-$1" ] && exit
echo "installing jaxbuf, flashbax and the compiler for $1 into .venv-cuda (a minute or two)"
"$PYTHON" -m venv --clear .venv-cuda
run=.venv-cuda/bin/python
install="$run -m pip install --quiet --disable-pip-version-check --no-input"
$install --upgrade 'pip>=25.1'
$install --editable . --group benchmark
version=$($run -c 'import jax; print(jax.__version__)')
$install --no-deps "jax-$1-plugin==$version" "jax-$1-pjrt==$version"
touch ".venv-cuda/.installed-$1"
