#!/usr/bin/env bash
# Installs scalerl for GPUs into $PREFIX, of an Ubuntu 24.04 or Debian 12 machine or image, as root. Run in the repository's root, where the
# image has pyproject.toml, README.md, LICENSE, requirements/ and scalerl/. TRANSFORMER_ENGINE=2.20.2 builds Transformer Engine too, which
# takes some 20 minutes and needs an image with cuDNN's headers.
set -euo pipefail
PREFIX=${PREFIX:-/opt/scalerl}
TRANSFORMER_ENGINE=${TRANSFORMER_ENGINE:-}

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# g++ and Python's headers: Triton, torch.compile and SGLang compile kernels at run time. libnuma and libibverbs: SGLang and NCCL load them.
apt-get install -y -qq --no-install-recommends \
  ca-certificates g++ git iproute2 libibverbs1 libnuma1 numactl procps python3 python3-dev python3-venv rdma-core
rm -rf /var/lib/apt/lists/*

python3 -m venv "$PREFIX"
"$PREFIX/bin/pip" install --no-cache-dir --no-deps -r requirements/gpu.txt
"$PREFIX/bin/pip" install --no-cache-dir --no-deps --no-build-isolation .
if [[ -n $TRANSFORMER_ENGINE ]]; then
  # Not --no-deps: without its compiled parts it is a package that cannot be imported, and megatron with it.
  "$PREFIX/bin/pip" install --no-cache-dir --no-build-isolation -c requirements/gpu.txt \
    "transformer-engine[pytorch,core_cu13]==$TRANSFORMER_ENGINE"
fi
"$PREFIX/bin/scalerl" doctor
