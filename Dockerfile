# syntax=docker/dockerfile:1
# One image for head, routers and replicas, on CPUs (`--target cpu`) or NVIDIA GPUs (`--target cuda`):
#
#     docker build --target cpu -t holdfast:0.1.0-ray2.60.0-cpu .
#
# PyTorch's wheels of the default index bring CUDA along. For a smaller CPU image name the index of its CPU wheels:
# `--build-arg TORCH_INDEX=URL`.
ARG PYTHON=3.12

# --- what is compiled and installed
FROM python:${PYTHON}-slim-bookworm AS compiler
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/holdfast
ENV PATH=/opt/holdfast/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source

FROM compiler AS install-cpu
ARG TORCH_INDEX=""
COPY constraints.txt ./
RUN pip install --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY . .
RUN pip install --constraint constraints.txt '.[serve]'

FROM compiler AS install-cuda
COPY constraints.txt ./
RUN pip install --constraint constraints.txt torch
COPY . .
RUN pip install --constraint constraints.txt '.[serve]'

# --- what runs: nothing of it as root. KubeRay's commands and probes need bash and wget.
FROM python:${PYTHON}-slim-bookworm AS runtime
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bash ca-certificates wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home holdfast
ENV PATH=/opt/holdfast/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/home/holdfast
# as `holdfast serve` tells the processes of its own Ray: see cluster/serve/serve_port.py
ENV GRPC_EXPERIMENTS=-event_engine_client
WORKDIR /home/holdfast
CMD ["holdfast", "--help"]

FROM runtime AS cuda
# Triton compiles what launches its kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=install-cuda /opt/holdfast /opt/holdfast
# The container runtime puts the driver in.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000

FROM runtime AS cpu
COPY --from=install-cpu /opt/holdfast /opt/holdfast
USER 1000
