#!/bin/sh
# Runs the README with a wheel that was built for another jaxlib than the one beside it: in the
# environment $1, with the oldest versions, one that was built in $2, with newer ones, and the
# reverse. Kernels for an older jaxlib work; kernels for a newer one have to stay off, with a warning.
set -e
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
pip="-m pip --disable-pip-version-check --quiet"

for venv in "$1" "$2"; do
  "$venv/bin/python" $pip install 'scikit-build-core>=0.11' cmake ninja
  "$venv/bin/python" $pip wheel --no-deps --no-build-isolation --wheel-dir "$wheels/$(basename "$venv")" .
done
cp README.md "$wheels"

# Runs the README in the environment $1 with the wheel of $2, whose kernels are expected to be $3.
try() {
  "$1/bin/python" $pip install --no-deps --force-reinstall "$wheels/$(basename "$2")"/*.whl
  echo "wheel of $(basename "$2") in $(basename "$1"): kernels $3"
  (cd "$wheels" && JAX_PLATFORMS=cpu "$1/bin/python" -c '
import doctest, sys, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import jax, jaxbuf
    found = jaxbuf.native_available(), any("jaxlib" in str(warning.message) for warning in said)
expected = sys.argv[1] == "on"
assert found == (expected, not expected), found
failed, tried = doctest.testfile("README.md", False, optionflags=doctest.ELLIPSIS)
assert tried and not failed' "$3")
}

try "$(realpath "$1")" "$2" off
try "$(realpath "$2")" "$1" on
