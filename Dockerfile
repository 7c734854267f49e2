# The coordinator's server: no torch, no engine. Workers run elsewhere and talk to it over HTTP.
FROM python:3.11-slim AS build
WORKDIR /src
RUN python -m venv /opt/coordinator
COPY requirements/server.lock requirements/server.lock
RUN /opt/coordinator/bin/pip install --no-cache-dir --no-deps -r requirements/server.lock
COPY pyproject.toml README.md LICENSE ./
COPY coordinator coordinator
COPY worker_agent worker_agent
COPY migrations migrations
RUN /opt/coordinator/bin/pip install --no-cache-dir --no-deps .

FROM python:3.11-slim
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/rollout-coordinator --create-home coordinator
COPY --from=build /opt/coordinator /opt/coordinator
ENV PATH=/opt/coordinator/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    COORDINATOR_DATA=/var/lib/rollout-coordinator
USER coordinator
WORKDIR /var/lib/rollout-coordinator
VOLUME /var/lib/rollout-coordinator
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=3)"]
# DATABASE_URL names the Postgres. The server takes the shell's place, so that a stop signal reaches it.
CMD ["sh", "-c", "coordinator migrate && exec coordinator serve --host 0.0.0.0 --port 8000"]
