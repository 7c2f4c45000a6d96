#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv in the repository root; does nothing when it is already up to date.
#   scripts/setup_env.sh [PYTHON]       PYTHON: an interpreter >= 3.11 (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
requirements=requirements/cpu.txt
stamp=.venv/.segreuse-setup
origin_stamp=.venv/.segreuse-origin
log=.venv/setup.log

fail() {
    echo "setup: $*" >&2
    exit 1
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "'$python' is not a Python of at least 3.11; name one: make setup PYTHON=python3.11"

# Two commands may be started side by side: the second waits here and then finds the work done.
if command -v flock >/dev/null; then
    exec 9>"${TMPDIR:-/tmp}/vllm-segreuse-setup-$(id -u).lock"
    flock 9
fi

fingerprint=$(
    # A virtual environment knows its own path and interpreter, so both are part of its state.
    { pwd; "$python" -VV; cat "$requirements" pyproject.toml setup.py scripts/setup_env.sh csrc/*/*.* kernels/*/*.*; } |
        "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ]; then
    exit 0
fi

started=$SECONDS
# Packages are of one interpreter, and scripts name the folder they were installed in. An environment
# from before there was this stamp is known by both.
origin=$(pwd; "$python" -VV)
made_of=$(
    cat "$origin_stamp" 2>/dev/null ||
        { sed -n '1s|^#!\(.*\)/\.venv/bin/python.*|\1|p' .venv/bin/pip && .venv/bin/python -VV; } 2>/dev/null
) || true
if [ ! -x .venv/bin/python ] || [ "$made_of" != "$origin" ]; then
    # What it leads to may be another checkout's, in use.
    [ ! -L .venv ] || [ -z "$(ls -A .venv/ 2>/dev/null)" ] ||
        fail ".venv is a link to $(readlink .venv), which was made for another folder or by another Python: remove the link"
    "$python" -m venv --clear .venv
fi
echo "$origin" >"$origin_stamp"
rm -f "$stamp"
: >"$log"

pip_install() {
    # --no-compile: done below, on all cores.
    .venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check \
        --no-deps --no-compile "$@" >>"$log" 2>&1 && return
    grep -E '^ *(ERROR|error)' "$log" >&2 || tail -n 20 "$log" >&2
    if grep -q 'torch==' "$log"; then
        echo "setup: the CPU build of torch is on PyTorch's own index; add it with" \
            "PIP_EXTRA_INDEX_URL=<url of PyTorch's CPU wheels> make setup" >&2
    fi
    fail "pip failed; its full output is in $log"
}

echo "setup: installing $(grep -c == "$requirements") pinned packages into .venv (minutes, the first time only)"
# Unpacking takes one core: half of the packages each.
for half in 0 1; do
    grep == "$requirements" | awk "NR % 2 == $half" >".venv/half$half.txt"
done
pip_install -r .venv/half0.txt &
first=$!
pip_install -r .venv/half1.txt
wait "$first"

# Where PYTHONDONTWRITEBYTECODE is set nobody else would write byte code, and each process of vLLM
# would take twice as long to start. What servers and tests import is a third of what there is, and
# importing it compiles it. The kernels are built meanwhile.
PYTHONDONTWRITEBYTECODE= .venv/bin/python -c "import torch, vllm.entrypoints.openai.api_server, \
    vllm.entrypoints.llm, vllm.v1.worker.cpu_worker, openai, pytest, schemathesis" \
    >.venv/import.log 2>&1 &
importing=$!
pip_install --no-build-isolation --editable .

# A CUDA build of these beside a CPU torch breaks the import of transformers.
for name in torchvision torchaudio torchcodec; do
    if .venv/bin/python -c "import importlib.metadata as m; m.version('$name')" 2>/dev/null; then
        fail "$name is installed in .venv and breaks vLLM on CPU: .venv/bin/pip uninstall $name"
    fi
done
wait "$importing" && .venv/bin/python -c "import vllm_segreuse" >>.venv/import.log 2>&1 ||
    fail "the environment does not import: $(tail -n 1 .venv/import.log) (see .venv/import.log)"

echo "$fingerprint" >"$stamp"
echo "setup: done in $((SECONDS - started)) s"
