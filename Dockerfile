# jax_kvblock with its CUDA kernels, on any NVIDIA GPU of compute capability 8.0 or newer.
#
#   docker build -t jax-kvblock .
#   docker run --rm --gpus all jax-kvblock                    # the capability report
#   docker run --rm --gpus all -it jax-kvblock python         # work with it
FROM nvidia/cuda:13.0.0-devel-ubuntu24.04

# Ubuntu 24.04 has Python 3.12. Its headers and a C++ compiler are all that the build needs.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

# The system's own Python takes no packages from pip.
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

# Before the sources, so that a change of those does not fetch jax again.
RUN pip install --no-cache-dir "jax[cuda13]"

# Only what the wheel is made of; .gitignore keeps builds in your tree out of it.
WORKDIR /src
COPY .gitignore pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY cpp cpp
COPY jax_kvblock jax_kvblock

# ON fails rather than build without the kernels. Empty CUDA_ARCHS means the default:
# code for sm_80 and sm_90a, and PTX for newer GPUs.
ARG CUDA_ARCHS=
RUN KVBLOCK_CUDA=ON CUDA_ARCHS=$CUDA_ARCHS pip wheel -v --no-cache-dir --no-deps -w /wheels . \
 && pip install --no-cache-dir /wheels/*.whl \
 && rm -rf build

# Elsewhere, so that Python imports the installed package and not the sources.
WORKDIR /root
CMD ["jax-kvblock"]
