#!/usr/bin/env bash
# Starts a rollout server for --rollout-urls on this node's GPUs, or on its CPU if there are none.
#
#     bash scripts/serve_rollout.sh MODEL [FLAGS OF vLLM'S SERVER]
#     bash scripts/serve_rollout.sh Qwen/Qwen2.5-0.5B-Instruct --port 8000 --max-model-len 1536 --max-num-seqs 512
#
# --dtype must be the trainer's, --max-num-seqs at least its --group-size. CUDA_VISIBLE_DEVICES picks the GPUs. A trainer
# without a GPU must run on the machine of vLLM's server. The server listens on loopback. --host 0.0.0.0 opens it to the
# network, where anyone who reaches it can replace its weights. On a CPU, a model with Mamba layers also needs
# --no-enable-prefix-caching.
#
# If SGLANG names a virtual environment, this starts SGLang's server from it, for --rollout-backend sglang:
#
#     SGLANG=.sglang bash scripts/serve_rollout.sh MODEL [FLAGS OF SGLANG'S SERVER]
#     SGLANG=.sglang bash scripts/serve_rollout.sh Qwen/Qwen2.5-0.5B-Instruct --port 30000 --dtype bfloat16
#
# docs/placement.md says how to make that environment. --tp 2 shares a model over two GPUs.
set -euo pipefail
model=${1:?"a model's folder or Hub name"}
root=$(dirname "$0")/..
has_gpu() {
  case ${CUDA_VISIBLE_DEVICES-all} in "" | -1) return 1 ;; esac  # the CPU is asked for
  nvidia-smi -L > /dev/null 2>&1
}
if [ -n "${SGLANG:-}" ]; then
  export PATH="$SGLANG/bin:$PATH"
  if has_gpu; then
    own=(--enable-fp32-lm-head)  # logits in float32, as in the trainer
  else
    # One thread: two OpenMP threads on two busy cores are 30 times slower. Compiling gains nothing on a CPU.
    export SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 CUDA_VISIBLE_DEVICES=""
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-0}
    own=(--device cpu)
  fi
  # Without --sleep-on-idle a server that has nothing to do keeps a core busy.
  exec "$SGLANG/bin/python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --sleep-on-idle \
    "${own[@]}" "${@:2}"
fi
export VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1  # the first opens the routes for weight updates
if has_gpu; then
  # As common/rollout/engines.py: no TF32 in float32 (bfloat16 does not use it), no all-reduce that nvcc has to compile.
  export TRITON_F32_DEFAULT=${TRITON_F32_DEFAULT:-ieee}
  export VLLM_ALLREDUCE_USE_FLASHINFER=${VLLM_ALLREDUCE_USE_FLASHINFER:-0}
  own=(--weight-transfer-config '{"backend": "nccl"}' --hf-overrides '{"head_dtype": "float32"}'
    --compilation-config '{"pass_config": {"fuse_allreduce_rms": false}}')
else
  # As common/rollout/engines.py, too: one process for an engine and its worker, and no compiling, which gains nothing there.
  export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
  export VLLM_ENABLE_V1_MULTIPROCESSING=${VLLM_ENABLE_V1_MULTIPROCESSING:-0} TORCHDYNAMO_DISABLE=1
  own=(--weight-transfer-config '{"backend": "shared_memory"}' --enforce-eager --no-enable-chunked-prefill)
fi
exec "$root/.venv/bin/python" -m vllm.entrypoints.launchers.api_server.entry --model "$model" --host 127.0.0.1 \
  --generation-config vllm --logprobs-mode processed_logprobs \
  --skip-tokenizer-init --enable-scale-out "${own[@]}" "${@:2}"
