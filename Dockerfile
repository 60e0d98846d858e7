# ditile and its server, for CPUs:
#
#     docker build --tag ditile .
#     docker run --rm --publish 127.0.0.1:8000:8000 ditile serve --model shapes-flux --host 0.0.0.0 --insecure
#
# For NVIDIA GPUs, with a torch that brings CUDA (the host brings the driver and the NVIDIA Container Toolkit):
#
#     docker build --tag ditile --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#     docker run --rm --gpus all --shm-size 8g ... ditile serve --model ... --host 0.0.0.0 --api-key FILE
#
# BASE with a C compiler, such as python:3.12, is for --compile.
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=serve,page,video
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /opt/ditile
COPY constraints.txt pyproject.toml setup.py README.md LICENSE ./
COPY src src
RUN python -m pip install --no-cache-dir --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" ".[${EXTRAS}]"

# Jobs, results and models are kept in its home, for longer than the container where a volume is mounted there.
RUN useradd --create-home --home-dir /var/lib/ditile --uid 1000 ditile
# By number, as Kubernetes checks that it is not root before it knows names.
USER 1000
WORKDIR /var/lib/ditile
VOLUME /var/lib/ditile
EXPOSE 8000
ENTRYPOINT ["ditile"]
CMD ["--help"]
