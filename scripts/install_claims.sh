#!/bin/sh
# Installs the libraries that the guides make claims about, once: into .venv-claims, and those with torch,
# which want an older NumPy than jax, into .venv-claims-torch. TORCH_INDEX says where torch is, and
# TORCHRL may name a folder with its source where its wheel does not fit this torch. What does not
# install is left out, and the table says so.
set -e

[ -e .venv-claims/.installed ] && exit
echo "installing six libraries into .venv-claims and .venv-claims-torch (some minutes)"
install() {
  folder=$1
  shift
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@" ||
    echo "did not install: $*"
}
"$PYTHON" -m venv --clear .venv-claims
install .venv-claims flashbax==0.1.3 jax==0.10.2
install .venv-claims cpprb==11.0.0
"$PYTHON" -m venv --clear .venv-claims-torch
# torch alone comes from this index, which need not have what torch depends on.
install .venv-claims-torch --no-deps --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" torch==2.13.0
install .venv-claims-torch stable-baselines3==2.9.2
install .venv-claims-torch torchgfn==2.4.1
install .venv-claims-torch "${TORCHRL:-torchrl==0.14.0}"
# DI-engine asks for releases that pip searches for a long time; its buffers import these.
install .venv-claims-torch --no-deps DI-engine==0.5.3
install .venv-claims-torch gym==0.25.1 DI-toolkit DI-treetensor easydict hickle tabulate cloudpickle \
  trueskill tensorboardX requests responses URLObject pynng redis mpire einops flask matplotlib 'numpy<2'
touch .venv-claims/.installed
