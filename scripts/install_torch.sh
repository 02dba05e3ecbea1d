#!/bin/sh
# Installs torchgfn and torchrl for the benchmarks, once. They need another NumPy than jaxbuf, so they
# live in .venv-torch. TORCH_INDEX says where torch is, and TORCHRL may name a folder with its source
# where its wheel does not fit this torch.
set -e

[ -e .venv-torch/.installed ] && exit
echo "installing torchgfn, torchrl and torch (CPU) into .venv-torch (some minutes)"
"$PYTHON" -m venv .venv-torch
run=.venv-torch/bin/python
install="$run -m pip install --quiet --disable-pip-version-check --no-input"
# torch alone comes from this index, which need not have what torch depends on.
$install --no-deps --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" torch==2.13.0
$install 'torchgfn>=2.4' pybind11 setuptools wheel
{ $install --no-build-isolation "${TORCHRL:-torchrl}" && $run -c 'import torch, torchrl._torchrl'; } ||
  echo "torchrl does not run with this torch; its part of the benchmark is left out"
touch .venv-torch/.installed
