#!/bin/bash
# vLLM 0.26 for a GPU machine without a network, with Python 3.12, torch 2.11 for CUDA 13, triton and transformers: what
# serving_cuda.py needs there, some 50 MB, in two parts.
#
#   serving_bundle.sh pack OUT          here, with a package index: OUT/a and OUT/b
#   serving_bundle.sh unpack A TARGET   there, of each part
#   . TARGET/env.sh                     then: python benchmarks/serving_cuda.py check
#
# The project itself is built apart, beside that torch. Left out of vLLM: FlashAttention 2, kernels of mixtures of experts,
# and what dense models on a Hopper GPU never load. Machine code of other GPUs is zeroed, so that it packs to nothing.
# xgrammar is a stub: it serves structured output alone.
set -euo pipefail

VLLM=0.26.0
PACKAGES="annotated-types==0.8.0 apache-tvm-ffi==0.1.10 astor==0.8.1 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0
  compressed-tensors==0.17.0 depyf==0.20.0 dill==0.4.1 diskcache==5.6.3 distro==1.9.0 dnspython==2.9.2
  docstring-parser==0.18.0 email-validator==2.4.0 fastapi==0.136.3 gguf==0.19.0 httpcore2==2.16.2 httptools==0.9.0
  httpx2==2.16.2 ijson==3.6.0 importlib-metadata==10.2.0 interegular==0.3.3 jiter==0.19.0 jsonschema==4.26.0
  jsonschema-specifications==2025.9.1 lark==1.2.2 llguidance==1.7.6 lm-format-enforcer==0.11.3 loguru==0.7.3
  mistral-common==1.13.1 msgspec==0.22.0 nvtx==0.2.17 openai==3.57.0 openai-harmony==0.0.8 opentelemetry-api==1.45.2
  outlines-core==0.2.14 partial-json-parser==0.2.1.1.post7 prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1
  pycountry==26.2.16 pydantic==2.14.4 pydantic-core==2.50.5 pydantic-extra-types==2.11.1 python-dotenv==1.2.4
  python-json-logger==4.2.0 python-multipart==0.0.34 pyzmq==27.3.0 referencing==0.37.0 rpds-py==2026.9.1
  setproctitle==1.3.8 sniffio==1.3.1 starlette==1.10.0 truststore==0.10.5 typing-inspection==0.4.5 uvicorn==0.54.0
  watchfiles==1.3.0 websockets==17.4"
LIBRARIES="_C_stable_libtorch.abi3.so vllm_flash_attn/_vllm_fa3_C.abi3.so"

keep_sm90() { # IN OUT
  python3 - "$1" "$2" <<'P'
import struct, sys

MAGIC, CODE, PTX = struct.pack("<I", 0xBA55ED50), 2, 1
data, at = bytearray(open(sys.argv[1], "rb").read()), 0
while (at := data.find(MAGIC, at)) >= 0:
    version, head, size = struct.unpack_from("<HHQ", data, at + 4)
    if (version, head) != (1, 16) or at + head + size > len(data):
        at += 4
        continue
    entries, entry, end = [], at + head, at + head + size
    while entry < end:  # kind, size of the header, bytes, compute capability
        kind, _, header, length = struct.unpack_from("<HHIQ", data, entry)
        entries.append((kind, struct.unpack_from("<I", data, entry + 28)[0], entry + header, length))
        entry += header + length
    own = any((kind, gpu) == (CODE, 90) for kind, gpu, *_ in entries)
    for kind, gpu, start, length in entries:
        if (kind == CODE and gpu != 90) or (kind == PTX and own):
            data[start : start + length] = bytes(length)
    at = end
open(sys.argv[2], "wb").write(data)
P
}

pack() {
  local out work platforms="" n
  mkdir -p "$1/a" "$1/b"
  out=$(realpath "$1"); work=$(mktemp -d); cd "$work"
  for n in 39 35 34 31 28 27 24 17 12 5; do platforms="$platforms --platform manylinux_2_${n}_x86_64"; done
  python3 -m pip download -q --no-deps --only-binary=:all: -d vllm-wheel "vllm==$VLLM"
  # shellcheck disable=SC2086
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d wheels $PACKAGES
  mkdir site whole
  for n in wheels/*.whl; do unzip -qo "$n" -d site; done
  unzip -qo vllm-wheel/*.whl -d whole
  rm -rf site/pycountry/locales site/mistral_common/data/*
  mkdir -p site/xgrammar && touch site/xgrammar/testing.py
  cat > site/xgrammar/__init__.py <<'P'
class _Absent:
    pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent
P
  cp -r whole/vllm-$VLLM.dist-info site/
  tar -C site -cf - . | xz -6 > "$out/a/site.tar.xz"
  (cd whole && find vllm -type f -size -4M ! -path '*/third_party/*cutlass*' ! -path '*/deep_gemm/include/*' \
    ! -path '*/third_party/tml_fa4/*' ! -path '*/third_party/fmha_sm100/*' ! -name '_flashmla_C*' ! -name '_qutlass_C*' \
    ! -name '_C.cpython-31[0134]*' -print0 | tar --null -T - -cf - | xz -6) > "$out/a/vllm.tar.xz"
  for n in $LIBRARIES; do
    keep_sm90 "whole/vllm/$n" library
    xz -9e -c library > "$out/b/$(basename "$n").xz"
  done
  rm -rf "$work"
  du -sh "$out/a" "$out/b"
}

unpack() {
  local n
  mkdir -p "$2/site"
  for n in "$1"/*.tar.xz; do
    [ -e "$n" ] && python3 -c 'import lzma, sys, tarfile
tarfile.open(fileobj=lzma.open(sys.argv[1]), mode="r|").extractall(sys.argv[2])' "$n" "$2/site"
  done
  for n in $LIBRARIES; do
    [ -e "$1/$(basename "$n").xz" ] && mkdir -p "$(dirname "$2/site/vllm/$n")" && python3 -c 'import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"), 1 << 24)' "$1/$(basename "$n").xz" "$2/site/vllm/$n"
  done
  cat > "$2/env.sh" <<P
export PYTHONPATH=$(realpath "$2")/site:\${PYTHONPATH:-} VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
P
}

case "${1:-}" in
  pack) pack "$2" ;;
  unpack) unpack "$2" "$3" ;;
  *) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
