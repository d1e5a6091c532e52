#!/usr/bin/env bash
# Installs the project into an empty environment and runs the three examples from a folder outside the repository.
# Ten classes; logistic regression on the pixels gives 0.95.
set -euo pipefail
repository="$(cd "$(dirname "$0")/.." && pwd)"
outside="$(mktemp -d)"
trap 'rm -rf "$outside"' EXIT
cp "$repository"/examples/*.py "$outside"
cd "$outside"
python3 -m venv environment
environment/bin/pip install --quiet "$repository"
learns() { environment/bin/python -c "import sys, $1; sys.exit(f'$1 learned nothing') if $1.main() < 0.93 else None"; }
for example in *.py; do learns "${example%.py}"; done
NNX_GRAPH_MODE=false NNX_GRAPH_UPDATES=false learns nnx_hook
