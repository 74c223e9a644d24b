# syntax=docker/dockerfile:1
# The server in a container; docs/serving.md shows how to run it. For CPUs, and for CUDA GPUs:
#   docker build --tag hf-speculate .
#   docker build --tag hf-speculate:cuda --build-arg DEVICE=cuda .
# torch comes from pip's own index, whose wheels for Linux hold CUDA's libraries. An index of torch's builds for
# CPUs makes the image smaller: --build-arg TORCH_INDEX_URL=<index>
# Grammars for `response_format` need another extra: --build-arg EXTRAS=serve,grammar
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX_URL
ARG EXTRAS=serve
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /build
RUN python -m venv /opt/hf_speculate
ENV PATH=/opt/hf_speculate/bin:$PATH
# torch comes alone and first: its layer outlives changes of the library, and the next step finds what it requires.
# hadolint ignore=DL3013
RUN pip install --no-deps ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} "${TORCH}"
COPY constraints.txt .
# torch for CUDA requires one version of Triton.
RUN grep --invert-match --extended-regexp '^(torch|triton)==' constraints.txt > pins.txt
COPY setup.cfg setup.py pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md ./
COPY hf_speculate hf_speculate
RUN pip install --constraint pins.txt ".[${EXTRAS}]"

FROM python:${PYTHON}-slim
ARG DEVICE=cpu
# Triton compiles a launcher for each of its kernels.
# hadolint ignore=DL3008
RUN case "${DEVICE}" in cpu) ;; *) \
      apt-get update \
      && apt-get install --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/* ;; esac
RUN useradd --uid 1000 --home-dir /models --create-home speculate
COPY --from=build /opt/hf_speculate /opt/hf_speculate
# Models of the Hub and compiled kernels lie below the home directory.
ENV PATH=/opt/hf_speculate/bin:$PATH HOME=/models HF_HOME=/models/huggingface PYTHONUNBUFFERED=1
VOLUME /models
WORKDIR /models
USER 1000
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=15m --start-interval=5s \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# 0.0.0.0 is the container's network; `docker run --publish` decides who reaches it. Pages of other sites,
# which a browser may lead here by a name of theirs, are refused; add a name with --allowed-host.
ENTRYPOINT ["hf-speculate", "serve", "--host", "0.0.0.0", "--allowed-host", "localhost"]
CMD ["--help"]
