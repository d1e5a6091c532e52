#!/usr/bin/env bash
# Installs the project into an empty environment and runs the three examples from a folder outside the repository.
set -euo pipefail
repository="$(cd "$(dirname "$0")/.." && pwd)"
outside="$(mktemp -d)"
trap 'rm -rf "$outside"' EXIT
cp "$repository"/examples/*.py "$outside"
cd "$outside"
python3 -m venv environment
environment/bin/pip install --quiet "$repository"
for example in *.py; do environment/bin/python "$example"; done
NNX_GRAPH_MODE=false NNX_GRAPH_UPDATES=false environment/bin/python nnx_hook.py
