#!/bin/sh
# Prints the Python to make .venv with: the first that runs, on PATH, of pyenv or of uv, of the versions given, which
# are by default those supported, the newest first. Where there is none it prints python3, for install.machine to refuse.
[ $# -gt 0 ] || set -- 3.13 3.12
for version; do
    for python in "python$version" python3 "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python \
        "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/cpython-$version".*/bin/python; do
        # It has to run: pyenv puts shims on PATH, too, for Pythons that it does not start. Builds without the GIL have
        # the flag t, and there are no wheels for them.
        found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2] + sys.abiflags)' 2>/dev/null)
        [ "$found" != "$version" ] || { echo "$python" && exit; }
    done
done
echo python3
