# docker build -t mosaic .
# docker run --rm --gpus all mosaic                                    reports what the GPU can do
# docker run --rm --gpus all -v "$PWD":/work mosaic mosaic run --model train.py:make
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python3 -m venv /opt/mosaic && /opt/mosaic/bin/pip install --no-cache-dir '/src[demo]'

FROM nvidia/cuda:13.0.1-base-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/mosaic /opt/mosaic
ENV PATH=/opt/mosaic/bin:$PATH OMP_WAIT_POLICY=PASSIVE
WORKDIR /work
CMD ["mosaic", "doctor"]
