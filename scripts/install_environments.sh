#!/bin/sh
# Installs the libraries of environments that the guide has lines for, once, into .venv-environments.
# Some want an older jax than they run on, and gymnax and jaxmarl would bring one: both come without
# what they ask for. Python 3.12 or newer has this jax.
set -e

[ -e .venv-environments/.installed ] && exit
for python in "$PYTHON" python3.13 python3.12; do
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && break
  python=
done
if [ -z "$python" ]; then
  echo "these libraries need Python 3.12 or newer: make test-environments PYTHON=/path/to/python3.12" >&2
  exit 1
fi
echo "installing thirteen libraries of environments into .venv-environments (some minutes)"
"$python" -m venv --clear .venv-environments
run=.venv-environments/bin/python
install="$run -m pip install --quiet --disable-pip-version-check --no-input"
$install --upgrade 'pip>=25.1'
$install --editable . jax==0.12.0.1 gymnasium==1.4.0 ale-py==0.12.1 envpool==1.2.7 brax==0.14.2 \
  playground==0.2.0 jumanji==1.1.2 craftax==1.6.1 navix==4.0.0 xminigrid==0.9.3 pgx==2.6.0 \
  jax-envelope==0.6.1 chex==0.1.92 seaborn six
$install --no-deps gymnax==1.0.1 jaxmarl==0.2.0
touch .venv-environments/.installed
