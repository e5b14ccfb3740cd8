# Fedlens in a container, for the CPU:
#   docker build --tag fedlens .
#   docker run --rm --volume "$PWD:/work" fedlens run examples/quickstart.toml
# For GPUs, BASE is an image with PyTorch 2.11 or newer and a C compiler, by which Triton makes its kernels, as those
# of pytorch/pytorch that end in -devel:
#   docker build --tag fedlens-cuda --build-arg BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-devel .
#   docker run --rm --gpus all --volume "$PWD:/work" fedlens-cuda run examples/quickstart.toml
ARG BASE=python:3.12-slim
FROM ${BASE}
# Images with PyTorch may leave Python to their system, which pip would not touch otherwise.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
COPY . /opt/fedlens
# A torch that is there already is kept; the one from this address has no CUDA in it, and is a tenth as large.
RUN python -m pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu '/opt/fedlens[fleet]'
WORKDIR /work
ENTRYPOINT ["fedlens"]
