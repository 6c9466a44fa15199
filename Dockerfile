# syntax=docker/dockerfile:1
# Three images of one tree: `worker` (no torch), `torch` (the dev engine and the trainer) and `dashboard`. All run as user
# 10001.
ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS base
RUN groupadd --gid 10001 atropos \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/atropos atropos \
    && install -d -o atropos -g atropos /var/lib/atropos /var/lib/atropos/checkpoints /work
ENV PATH=/opt/atropos/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ATROPOS_HOME=/var/lib/atropos

# What we depend on changes less often than we do, so it is installed before the tree is copied.
FROM python:${PYTHON} AS dependencies
ENV PATH=/opt/atropos/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/atropos
WORKDIR /src
COPY pyproject.toml deploy/requirements.py ./
RUN python requirements.py > base.txt && pip install --requirement base.txt

FROM dependencies AS worker-venv
COPY . .
RUN pip install --no-deps .

FROM dependencies AS dashboard-venv
RUN python requirements.py dashboard > extras.txt && pip install --requirement extras.txt
COPY . .
RUN pip install --no-deps .

FROM dependencies AS torch-venv
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://pypi.org/simple
# hadolint ignore=DL3013
RUN pip install --index-url "${TORCH_INDEX}" "${TORCH}"
RUN python requirements.py engine train wandb > extras.txt && pip install --requirement extras.txt
COPY . .
RUN pip install --no-deps .

FROM base AS worker
COPY --from=worker-venv /opt/atropos /opt/atropos
USER 10001:10001
WORKDIR /work
CMD ["atropos-worker", "--roles", "workflows,model,tools,control"]

FROM base AS dashboard
COPY --from=dashboard-venv /opt/atropos /opt/atropos
USER 10001:10001
WORKDIR /work
CMD ["atropos", "dashboard"]

FROM base AS torch
COPY --from=torch-venv /opt/atropos /opt/atropos
USER 10001:10001
WORKDIR /work
CMD ["atropos-worker", "--roles", "trainer"]
