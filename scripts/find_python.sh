#!/bin/sh
# Prints the first Python >= 3.12 that runs and can make virtual environments; nothing if there is none.
# A name on PATH may be a pyenv shim that only fails: each candidate is tried, then pyenv's own installations.
usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }
for name in python3 python3.12 python3.13 python3.14; do
    if usable "$name"; then command -v "$name"; exit 0; fi
done
for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python; do
    if usable "$path"; then echo "$path"; exit 0; fi
done
