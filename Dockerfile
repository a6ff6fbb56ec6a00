# The quickstart on a GPU:
#   docker build -t mergekit_lab .
#   mkdir -p outputs
#   docker run --rm --gpus all --user "$(id -u):$(id -g)" -v mergekit_lab:/store -v "$PWD/outputs:/work/outputs" mergekit_lab
# Without `--gpus all` it runs on the CPU. Arguments after the image's name replace the quickstart's.
FROM python:3.12-slim

# Any user may write here, so that --user can be who owns the mounted folder.
RUN mkdir -m 1777 /store /work
WORKDIR /source
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE ./
COPY mergekit_lab mergekit_lab
COPY hydra_plugins hydra_plugins
COPY conf conf
# PyPI's torch for Linux brings CUDA's libraries; the host needs only NVIDIA's driver and container toolkit.
RUN pip install --no-cache-dir -c constraints.txt ".[demo]"

USER nobody
WORKDIR /work
ENV MERGEKIT_LAB_STORE=/store HOME=/tmp USER=nobody
ENTRYPOINT ["python", "-m", "mergekit_lab"]
CMD ["+experiment=quickstart"]
