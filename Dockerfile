# The quickstart on a GPU:
#   docker build -t mergekit_lab .
#   docker run --rm --gpus all -v mergekit_lab:/store -v "$PWD/outputs:/work/outputs" mergekit_lab
# Without `--gpus all` it runs on the CPU. Another command line follows the image's name.
FROM python:3.12-slim

RUN useradd --create-home lab && mkdir /store /work && chown lab /store /work
WORKDIR /source
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE ./
COPY mergekit_lab mergekit_lab
COPY hydra_plugins hydra_plugins
COPY conf conf
# PyPI's torch for Linux brings CUDA's libraries; the host needs NVIDIA's driver and container toolkit alone.
RUN pip install --no-cache-dir -c constraints.txt ".[demo]"

USER lab
WORKDIR /work
ENV MERGEKIT_LAB_STORE=/store
ENTRYPOINT ["python", "-m", "mergekit_lab"]
CMD ["+experiment=quickstart"]
