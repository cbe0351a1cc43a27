# Sourced by run_train.sh and scripts/test: leaves `python` and `torchrun` of an environment that
# has what the project needs. An active environment that satisfies the project is used as it is, also
# one that was made for another clone; otherwise .venv is made once, with the versions of
# constraints.txt. $1: "" or "[dev]".

extras=${1:-}
satisfied() { "$1" scripts/satisfied.py "$extras" 2>/dev/null; }

if command -v python >/dev/null && satisfied python; then
    :
elif [ -x .venv/bin/python ] && satisfied .venv/bin/python; then
    PATH=$PWD/.venv/bin:$PATH
else
    for base in python3 python3.13 python3.12 python3.11; do
        command -v "$base" >/dev/null &&
            "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && break
        base=
    done
    if [ -z "$base" ]; then
        echo "torchtitan needs Python 3.11 or newer, and there is none on PATH" >&2
        exit 1
    fi
    echo "Installing torchtitan$extras into .venv (once; some minutes)" >&2
    [ -x .venv/bin/pip ] || "$base" -m venv .venv  # also into one of uv, which has no pip
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable ".$extras"
    PATH=$PWD/.venv/bin:$PATH
fi
# The code of this clone, whichever clone the environment was made for.
export PATH PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
