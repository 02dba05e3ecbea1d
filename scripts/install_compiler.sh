#!/bin/sh
# Installs jax's compiler for NVIDIA GPUs, of the CUDA that $1 names, or for TPUs if that is "tpu", once.
# It lives in .venv-cuda or .venv-tpu: elsewhere jax would look for a device.
set -e

case $1 in
  tpu) venv=.venv-tpu ;;
  *) venv=.venv-cuda ;;
esac
[ -e "$venv/.installed-$1" ] && exit
echo "installing jaxbuf, flashbax and the compiler for $1 into $venv (a minute or two)"
"$PYTHON" -m venv --clear $venv
run=$venv/bin/python
install="$run -m pip install --quiet --disable-pip-version-check --no-input"
$install --upgrade 'pip>=25.1'
$install --editable . --group benchmark
version=$($run -c 'import importlib.metadata as m; print(m.version("jax"))')
case $1 in
  tpu) $install "jax[tpu]==$version" ;;
  *) $install --no-deps "jax-$1-plugin==$version" "jax-$1-pjrt==$version" ;;
esac
touch "$venv/.installed-$1"
