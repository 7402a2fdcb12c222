#!/usr/bin/env bash
# A rollout server for --rollout-urls, on this node's GPUs, or its CPU: bash scripts/serve_rollout.sh MODEL [FLAGS]
# FLAGS are of vLLM's server: --port 8000 --tensor-parallel-size 2 --max-model-len 1536 --max-num-seqs 512
# --dtype bfloat16 ... (--dtype as the trainer's). It listens on loopback; --host 0.0.0.0 opens it to the network, where
# whoever reaches it can replace its weights. CUDA_VISIBLE_DEVICES picks GPUs. A trainer without a GPU must be on the
# same machine.
set -euo pipefail
model=${1:?"a model's folder or Hub name"}
root=$(dirname "$0")/..
export VLLM_SERVER_DEV_MODE=1  # opens the routes for weights
if nvidia-smi -L > /dev/null 2>&1; then
  own=(--weight-transfer-config '{"backend": "nccl"}' --hf-overrides '{"head_dtype": "float32"}')
else
  export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind} TORCHDYNAMO_DISABLE=1
  own=(--weight-transfer-config '{"backend": "shared_memory"}' --enforce-eager --no-enable-chunked-prefill)
fi
exec "$root/.venv/bin/python" -m vllm.entrypoints.launchers.api_server.entry --model "$model" --host 127.0.0.1 \
  --generation-config vllm --logprobs-mode processed_logprobs \
  --skip-tokenizer-init --enable-scale-out "${own[@]}" "${@:2}"
