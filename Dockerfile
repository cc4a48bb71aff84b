# kl_comedy from the pins of constraints.txt. Built once for the CPU with buildah, on Debian 12 with Python 3.11 in place of
# the base image; not built with CUDA, nor in CI.
#   docker build -t kl_comedy .                                                     the CPU
#   docker build -t kl_comedy --build-arg TORCH_INDEX=https://pypi.org/simple --build-arg EXTRAS=[vllm] \
#     --build-arg CONSTRAINTS= .                                                    CUDA and vLLM, which chooses torch
#   docker run --gpus all -v $PWD:/work kl_comedy train /opt/kl_comedy/configs/quickstart.yaml
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=[train]
ARG CONSTRAINTS="-c constraints.txt"
WORKDIR /opt/kl_comedy
COPY . .
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir $CONSTRAINTS -e ".$EXTRAS" --extra-index-url $TORCH_INDEX
WORKDIR /work
ENTRYPOINT ["kl-comedy"]
CMD ["--help"]
