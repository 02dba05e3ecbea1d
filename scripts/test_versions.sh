#!/bin/sh
# Runs pytest with the arguments given, without MPI, in a fresh environment for each version of Python
# on this machine with the newest jax that installs there, and for $PYTHON with the oldest versions
# that are supported. $PYTHONS names other interpreters than those on PATH and of pyenv.

find_pythons() {
  for minor in 11 12 13 14; do
    for found in "$(command -v python3.$minor)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.$minor.*/bin/python; do
      # What pyenv puts on PATH fails unless that version is chosen.
      [ -x "$found" ] && "$found" -c "" 2>/dev/null && echo "$found" && break
    done
  done
}

failures=0
table="Python    jax       kernels  passed  failed  seconds"

# Tests with the interpreter $2 in the environment $1; the other arguments are for pip.
try() {
  venv=.venv-versions/$1 run=.venv-versions/$1/bin/python log=.venv-versions/$1/pytest.log
  install="$run -m pip install --quiet --disable-pip-version-check --no-input"
  begin=$(date +%s)
  echo "installing and testing with $2 ($1 versions)"
  "$2" -m venv --clear "$venv" && $install --upgrade 'pip>=25.1'
  shift 2
  if ! $install "$@" --editable '.[examples]' --group test; then
    failures=$((failures + 1)) table="$table
$venv: the installation failed"
    return
  fi
  # A library of the examples may hold jax back, which users of jaxbuf alone do not install.
  case $venv in *-newest) $install --upgrade --no-warn-conflicts jax jaxlib ;; esac
  MPI=0 $run -m pytest -q -n "$JOBS" --dist loadscope $tests >"$log" 2>&1 || failures=$((failures + 1))
  grep -E "^(FAILED|ERROR)" "$log"
  end=$(tail -n 1 "$log")
  row=$(JAX_PLATFORMS=cpu $run -c '
import platform, re, sys
import jax, jaxbuf
kernels = jaxbuf.native_available()
counts = dict((word, number) for number, word in re.findall(r"(\d+) (\w+)", sys.argv[1]))
passed = counts.get("passed", 0)
failed = int(counts.get("failed", 0)) + int(counts.get("error", counts.get("errors", 0)))
print(f"{platform.python_version():9} {jax.__version__:9} {kernels!s:7}  "
      f"{passed:>6}  {failed:>6}  {sys.argv[2]:>7}")
sys.exit(not kernels)' "$end" $(($(date +%s) - begin))) || failures=$((failures + 1))
  table="$table
$row"
}

tests=$*
default=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for python in ${PYTHONS:-$(find_pythons)}; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  # Without PYTHONS, the tests with the default version are those of make test.
  [ -z "$PYTHONS" ] && [ "$version" = "$default" ] || { try "$version-newest" "$python" && newest=$version; }
done
try "$default-oldest" "$PYTHON" --constraint .github/oldest.txt
echo "$table"
[ -z "$newest" ] || scripts/test_wheels.sh ".venv-versions/$default-oldest" ".venv-versions/$newest-newest" ||
  failures=$((failures + 1))
[ "$failures" = 0 ]
