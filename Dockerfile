# Three images. `docker build .` makes the first, the coordinator's server, without torch and without an engine:
#
#   docker build --target server     .   the coordinator
#   docker build --target worker-cpu .   worker-agent with the transformers engine, and what a small trainer needs
#   docker build --target worker-gpu .   worker-agent with the vLLM and verl that a GPU worker runs
#
# Each runs as the same plain user, and writes to the folders that are named below and to /tmp alone, so that its root
# may be read-only.

FROM python:3.11-slim AS base
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /tmp coordinator \
 && install --directory --owner=coordinator --group=coordinator \
      /var/lib/rollout-coordinator /var/lib/rollout-coordinator/artifacts /var/lib/worker /models
ENV PATH=/opt/coordinator/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

FROM python:3.11-slim AS source
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY coordinator coordinator
COPY worker_agent worker_agent
COPY migrations migrations


FROM python:3.11-slim AS worker-cpu-build
# The address of PyTorch's CPU wheel index (PyTorch's site, Start Locally). Left out, PyPI's torch for GPUs is taken,
# which works too and is several GB larger.
ARG TORCH_INDEX=
COPY requirements/cpu.lock requirements/cpu.lock
# Of the lock only what the transformers engine needs: vLLM, verl and Ray are 2 GB more.
RUN python -m venv /opt/coordinator \
 && /opt/coordinator/bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --constraint requirements/cpu.lock \
      fsspec httpx numpy pyarrow pydantic pydantic-core \
      filelock huggingface-hub peft prometheus-client pyyaml rich safetensors torch transformers typer
RUN --mount=type=bind,from=source,source=/src,target=/src,readwrite \
    /opt/coordinator/bin/pip install --no-cache-dir --no-deps /src

FROM base AS worker-cpu
COPY --from=worker-cpu-build /opt/coordinator /opt/coordinator
# A token for each holder lies on a volume of its own; a volume takes its owner from here.
RUN install --directory --owner=coordinator --group=coordinator \
      /tokens /tokens/trainer /tokens/reward /tokens/worker-1 /tokens/worker-2 /tokens/worker-gpu
ENV ROLLOUT_MODELS=/tmp/models \
    HF_HUB_OFFLINE=1
USER coordinator
WORKDIR /var/lib/worker
VOLUME /var/lib/worker
CMD ["worker-agent", "run"]


FROM python:3.11-slim AS worker-gpu-build
RUN python -m venv /opt/coordinator
# The CUDA libraries come with the wheels; of the host only the driver is needed.
RUN --mount=type=bind,from=source,source=/src,target=/src,readwrite \
    /opt/coordinator/bin/pip install --no-cache-dir '/src[worker]'

FROM base AS worker-gpu
# Triton compiles a launcher for each kernel when it is first used.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=worker-gpu-build /opt/coordinator /opt/coordinator
ENV ROLLOUT_MODELS=/tmp/models \
    HF_HUB_OFFLINE=1
USER coordinator
WORKDIR /var/lib/worker
VOLUME /var/lib/worker
CMD ["worker-agent", "run"]


FROM python:3.11-slim AS server-build
COPY requirements/server.lock requirements/server.lock
RUN python -m venv /opt/coordinator \
 && /opt/coordinator/bin/pip install --no-cache-dir --no-deps --requirement requirements/server.lock
RUN --mount=type=bind,from=source,source=/src,target=/src,readwrite \
    /opt/coordinator/bin/pip install --no-cache-dir --no-deps /src

FROM base AS server
COPY --from=server-build /opt/coordinator /opt/coordinator
ENV COORDINATOR_DATA=/var/lib/rollout-coordinator
USER coordinator
WORKDIR /var/lib/rollout-coordinator
VOLUME /var/lib/rollout-coordinator
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=3)"]
# DATABASE_URL, or a file that DATABASE_URL_FILE names, says where Postgres is; `coordinator migrate` comes first.
CMD ["coordinator", "serve", "--host", "0.0.0.0", "--port", "8000"]
