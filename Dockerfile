# An image with the `torchtitan` command: docker build -t torchtitan . && docker run torchtitan doctor
# With GPUs: docker run --gpus all --shm-size 8g -v $PWD:/work torchtitan train debug_model
FROM python:3.12-slim
# torch.compile compiles for the CPU by g++, and its kernels for CUDA need a C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /source
# The torch of this index is built for one version of CUDA: see Install in README.md.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu128
RUN pip install --no-cache-dir "torch>=2.11,<2.14" --index-url $TORCH_INDEX
COPY . .
RUN pip install --no-cache-dir .
WORKDIR /work
ENTRYPOINT ["torchtitan"]
