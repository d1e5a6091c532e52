#!/usr/bin/env bash
# DeiT-Tiny on CIFAR-10 for 50 epochs with five mechanisms, in half an hour of one H200 (estimated: 2.3, 2.5, 3.2, 7 and 7
# minutes); a second half hour adds kfac and the learning rate of each. The most telling runs come first. Start it again
# after any cut: finished runs are skipped, others resume.
#
#   bash experiments/gpu_half_hour.sh                       # runs/gpu/<name>, small records in results/gpu_half_hour/
#   FAST=1 bash experiments/gpu_half_hour.sh                # the same in minutes of a CPU, to try it
#   bash experiments/gpu_half_hour.sh second
#
# CIFAR-10 must be prepared as TFDS's ArrayRecord files; DATA is their folder where it is not TFDS's own.
set -euo pipefail
cd "$(dirname "$0")/.."

runs="${RUNS:-runs/gpu}" records="${RECORDS:-results/gpu_half_hour}"
common=(--config.num_epochs=50 --config.optimizer.warmup_epochs=5 --config.checkpoint_every_steps=1000 --config.init=path
  --config.eval_every_steps=1950 ${DATA:+--config.data.data_dir="$DATA"})
[[ -z "${FAST:-}" ]] || common+=(--config.num_epochs=0.02 --config.optimizer.warmup_epochs=0 --config.model.depth=2
  --config.model.width=48 --config.data.eval_split='test[:2%]')
product=(--config.model.qkv_linear=normed_dense --config.model.proj_linear=normed_dense --config.model.mlp_linear=normed_dense)

run() {  # run NAME EXPERIMENT OVERRIDES...: trains, draws maps, tests claims, keeps what is small
  local name="$1" experiment="$2" workdir="$runs/$1"
  shift 2
  [[ ! -e "$records/$name/claims.csv" ]] || return 0
  python main.py --config="experiments/$experiment.py:cifar10" --workdir="$workdir" "${common[@]}" "$@"
  python main.py --mode=analyze --workdir="$workdir"
  mkdir -p "$records/$name"
  cp "$workdir/config.json" "$workdir/metrics.jsonl" "$workdir/report/claims.csv" "$records/$name/"
}

first() {
  run dot deit_tiny
  run adder adder_deit_tiny
  run product deit_tiny "${product[@]}"
  run adder_without_identity adder_deit_tiny --config.model.identity=off
  run additive additive_deit_tiny
}

second() {
  run kfac deit_tiny --config.optimizer.name=kfac
  for rate in 2.5e-4 1e-3 2e-3; do
    run "dot_$rate" deit_tiny --config.optimizer.learning_rate="$rate"
    run "product_$rate" deit_tiny "${product[@]}" --config.optimizer.learning_rate="$rate"
    run "adder_$rate" adder_deit_tiny --config.optimizer.learning_rate="$rate"
  done
}

"${1:-first}"
