#!/usr/bin/env bash
# What others install, in empty environments and from folders outside the repository: builds the wheel and the source
# distribution, checks what is in them, runs the examples with the core alone, and trains by the command.
# Ten classes; logistic regression on the pixels gives 0.95. With --quick one example is run, and nothing is trained.
set -euo pipefail
quick="${1-}"
repository="$(cd "$(dirname "$0")/.." && pwd)"
outside="$(mktemp -d)"
trap 'rm -rf "$outside"' EXIT
cp "$repository"/examples/*.py "$outside"
cd "$outside"

python3 -m venv tools
tools/bin/pip install --quiet build twine check-wheel-contents
tools/bin/python -m build --quiet --outdir dist "$repository" >build.txt 2>&1 || { cat build.txt; exit 1; }
tools/bin/twine check --strict dist/*
tools/bin/check-wheel-contents --config "$repository/pyproject.toml" dist/*.whl
wheel=$(echo dist/*.whl)

python3 -m venv core
core/bin/pip install --quiet "$wheel" scikit-learn  # whose digits the examples learn
learns() { core/bin/python -c "import sys, $1; sys.exit(f'$1 learned nothing') if $1.main() < 0.85 else None"; }
learns plain_jax
if [ "$quick" != --quick ]; then
  for example in flax_mnist linen_hook nnx_hook; do learns "$example"; done
  core/bin/python nanodo.py
  NNX_GRAPH_MODE=false NNX_GRAPH_UPDATES=false learns nnx_hook
fi

python3 -m venv whole
whole/bin/pip install --quiet "$wheel[train,report,interop]"
mkdir empty
cd empty
if [ "$quick" = --quick ]; then mode=compile; else mode=train; fi
../whole/bin/adder-flax --mode="$mode" --config=adder_deit_tiny --config.num_epochs=1
