#!/bin/sh
# Creates .venv with $PYTHON, unless there is one of that version, and brings its pip up to date.
set -e

run=.venv/bin/python
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version="not found"
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "jaxbuf needs Python 3.11 or newer; $PYTHON is $version." >&2
  echo "Name one that is: make $GOAL PYTHON=/path/to/python3.12" >&2
  exit 1
fi
if [ "$($run -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ]; then
  echo "using the .venv that is here (Python $version)"
else
  echo "creating .venv with Python $version"
  "$PYTHON" -m venv --clear .venv || {
    echo "$PYTHON could not create .venv; on Debian and Ubuntu: apt install python3-venv" >&2
    exit 1
  }
fi
$run -m pip install --quiet --disable-pip-version-check --no-input --upgrade 'pip>=25.1'
