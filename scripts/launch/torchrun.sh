#!/usr/bin/env bash
# One node's share of a run on several nodes. On each of them, from the root of the repository, the same but NODE_RANK:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node-a bash scripts/launch/torchrun.sh algos/grpo.py --model ... --run-dir ...
#
# MASTER_ADDR     a name or address of node 0 that all nodes reach; its MASTER_PORT (29500) is where they meet
# NPROC_PER_NODE  ranks on this node; unset: one a GPU, or one without. A multiple of --rollout-tp keeps each engine on
#                 one node
# LOCAL_ADDR      this node's own address, where its host name means nothing to the others
# INTERFACE       network interface (eth0, ib0, ...) for NCCL and gloo, which else take the first that looks right
# RDZV_ID         a name for the run; nodes with another one are not let in
# GRACE           seconds that the ranks have after SIGTERM to end their step and save it, 300; torch's own 30 are few
# PYTHON          unset: .venv/bin/python, or python
#
# Rank 0, which writes the run directory, is on the node whose address sorts first: keep --run-dir, and the model unless
# it is a Hub name, on a file system that all nodes share.
set -euo pipefail
fail() { echo "error: $*" >&2; exit 2; }

[ $# -ge 1 ] || fail "no script given: bash scripts/launch/torchrun.sh algos/grpo.py [flags]"
[ -f "$1" ] || fail "$1: no such file in $PWD; start from the root of the repository"
nodes=${NNODES:-1} node=${NODE_RANK:-0} port=${MASTER_PORT:-29500}
[ "$nodes" = 1 ] || [ -n "${MASTER_ADDR:-}" ] || fail "NNODES=$nodes needs MASTER_ADDR, the address of node 0"
[ "$nodes" = 1 ] || [ -n "${NODE_RANK:-}" ] || fail "NNODES=$nodes needs NODE_RANK, 0 to $((nodes - 1))"
[ "$node" -ge 0 ] && [ "$node" -lt "$nodes" ] || fail "NODE_RANK=$node is not one of 0 to $((nodes - 1))"

python=${PYTHON:-}
if [ -z "$python" ]; then [ -x .venv/bin/python ] && python=.venv/bin/python || python=python; fi
ranks=${NPROC_PER_NODE:-$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}
if [ -n "${INTERFACE:-}" ]; then export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE; fi

# is_host: said, not guessed from host names. read_timeout: nodes do not start in the same minute, and 60 s is torch's.
exec "$python" -m torch.distributed.run \
  --nnodes "$nodes" --nproc-per-node "$ranks" \
  --rdzv-backend c10d --rdzv-id "${RDZV_ID:-onefile-rl}" --rdzv-endpoint "${MASTER_ADDR:-127.0.0.1}:$port" \
  --rdzv-conf "is_host=$((node == 0)),read_timeout=900,join_timeout=900" \
  --shutdown-timeout "${GRACE:-300}" \
  ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
  -- "$@" # or torchrun would take --n of the script for one of its own
