# Fedlens in a container. BASE is an image with Python 3.11 or newer; one with PyTorch for CUDA makes it a GPU's.
#   docker build --tag fedlens .
#   docker run --rm --volume "$PWD:/work" fedlens run examples/quickstart.toml
ARG BASE=python:3.12-slim
FROM ${BASE}
COPY . /opt/fedlens
RUN python -m pip install --no-cache-dir '/opt/fedlens[fleet]'
WORKDIR /work
ENTRYPOINT ["fedlens"]
