#!/bin/bash
# compute-sanitizer over the CUDA harnesses on a small matrix of cases, from the repository's root:
#
#   tests/cuda/sanitize.sh [ARCH] > benchmarks/results/h200/sanitizer.log
#
# ARCH: that of the GPU unless said, such as 90a. Ends with an error if any run finds anything.
set -u -o pipefail
arch=${1:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)}
[ "$arch" = 90 ] && arch=90a # for its products; nvcc's native is plain 90
arch=sm_$arch
at_once=$(($(nproc) / 2 + 1))
build=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null; rm -rf "$build"' EXIT
flags=(-std=c++17 -O2 -lineinfo -arch="$arch" -Icsrc -Icsrc/include)

for source in csrc/core/*.c csrc/kernels/scalar.c; do
    gcc -O2 -std=gnu11 -ffp-contract=off -Icsrc -Icsrc/include -c "$source" -o "$build/core_$(basename "$source").o" &
done
for source in csrc/cuda/*.cu; do nvcc "${flags[@]}" -c "$source" -o "$build/cuda_$(basename "$source").o" & done
for name in attend attend_blocks append; do
    nvcc "${flags[@]}" -c "tests/cuda/${name}_harness.cu" -o "$build/$name.o" 2> /dev/null &
done
wait
for name in attend attend_blocks append; do
    nvcc -arch="$arch" "$build/$name.o" "$build"/core_*.o "$build"/cuda_*.o -lpthread -o "$build/${name}_harness" || exit 1
done

# One run takes a core, and little of the GPU: several at a time, each with its own page of the log.
count=0
run() { # tool, harness, its arguments
    local page
    page=$(printf '%s/page_%05d' "$build" "$count")
    count=$((count + 1))
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n; done
    {
        echo "== $1 $2: ${*:3}${TURBOQUANT_CUDA_PATH:+ ($TURBOQUANT_CUDA_PATH)}${TQ_THIN:+ (thin $TQ_THIN)}"
        compute-sanitizer --error-exitcode 1 --tool "$1" "$build/$2_harness" "${@:3}" | tail -n 2 && touch "$page.passed"
    } > "$page" 2>&1 &
}

echo "compute-sanitizer, $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)"
for tool in memcheck racecheck synccheck; do
    for filter in "1 sequences" "26 sequences, bits 3" "50 sequences, bits 4" "400 sequences, bits 5310" \
        "12 rows, whole pages, bits 3 dim 64" "5 rows, whole pages, bits 5310" \
        "1 heads of 4, bits 4" "many segments, bits 3" "1140 segments, group 1, bits 2" \
        "1140 segments, group 5, bits 3"; do
        run "$tool" attend check "$filter" # in one kernel: Hopper alone
    done
    # Not for racecheck: it loses track where warps meet at named barriers, some more often than others, and all of them at __syncthreads
    # later. A kernel of ten lines shows that. In "some values zero" it finds nothing.
    [ "$tool" = racecheck ] ||
        for filter in "12 rows, whole pages, bits 3 dim 128" "7 heads of 12, bits 3" "20 in long sequences, bits 3" \
            "32 of 44 segments, bits 4" "tiles of rows, bits 4" "tiles of rows, bits 5310"; do
            run "$tool" attend check "$filter"
        done
    run "$tool" attend check "many rows: some values zero"
    for path in hopper hopper-line portable; do
        for filter in "bits 4 dim 128" "bits 3 dim 80" "bits 2 dim 64" "window" "mixed" "dense" "group 16 bits 3" "ragged" \
            "fine, everything" "fine, group" "fine 85321" "fine, not causal"; do
            TURBOQUANT_CUDA_PATH=$path run "$tool" attend check "$filter"
        done
    done
    for filter in "some values zero" "4 queries" "rising logits"; do # wgmma: Hopper alone
        TURBOQUANT_CUDA_PATH=hopper-line run "$tool" attend check "many rows: $filter"
    done
    for filter in "length 33" "queries, fresh, \"tables"; do run "$tool" attend_blocks "$filter"; done
    TQ_THIN=400 run "$tool" append check
done
wait
cat "$build"/page_?????
failures=$((count - $(find "$build" -name 'page_*.passed' | wc -l)))
echo "$failures of $count runs failed"
exit $((failures > 0))
