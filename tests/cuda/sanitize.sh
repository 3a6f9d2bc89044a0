#!/bin/bash
# compute-sanitizer over the CUDA harnesses on a small matrix of cases: make sanitize-harness, which builds them first.
#
#   tests/cuda/sanitize.sh FOLDER [TOOL...]    FOLDER: of attend_harness, attend_baseline_harness, chunk_harness and append_harness
#                                              TOOL: memcheck, racecheck, synccheck; the default is all three
#
# Prints the last lines of each run when it is over. Ends with an error if any run finds anything.
set -u -o pipefail
harnesses=${1:?the folder of the harnesses}
tools=("${@:2}")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck synccheck)
at_once=$(($(env -u OMP_NUM_THREADS nproc) / 2 + 1))
pages=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null; rm -rf "$pages"' EXIT

# One run takes a core, and little of the GPU: several at a time, each with its own page of the log.
count=0
run() { # tool, harness, its arguments
    local page
    page=$(printf '%s/page_%05d' "$pages" "$count")
    count=$((count + 1))
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n; done
    {
        {
            echo "== $1 $2: ${*:3}${TURBOQUANT_CUDA_PATH:+ ($TURBOQUANT_CUDA_PATH)}${TQ_THIN:+ (thin $TQ_THIN)}"
            compute-sanitizer --error-exitcode 1 --tool "$1" "$harnesses/$2_harness" "${@:3}" | tail -n 2 && touch "$page.passed"
        } > "$page" 2>&1
        cat "$page"
    } &
}

echo "compute-sanitizer, $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)"
for tool in "${tools[@]}"; do
    for filter in "1 sequences" "26 sequences, bits 3" "50 sequences, bits 4" "400 sequences, bits 5310" \
        "12 rows, whole pages, bits 3 dim 64" "5 rows, whole pages, bits 5310" \
        "1 heads of 4, bits 4" "many segments, bits 3" "1140 segments, group 1, bits 2" \
        "1140 segments, group 5, bits 3" "moments: 50 sequences, dim 128" "moments: sides 43, dim 128, group 4" \
        "absent pages, bits 3, dim 128, group 4, exact" "absent pages, bits 3, dim 128, group 12, exact" \
        "shares, everything, bits 4, group 3" "shares, bits 43, group 8" \
        "variance term, moments: shares, bits 4, group 3" "variance term, no moments: bits 4, dim 128, group 4"; do
        run "$tool" attend check "$filter" # in one kernel: Hopper alone
    done
    # Not for racecheck: it loses track where warps meet at named barriers, some more often than others, and all of them at __syncthreads
    # later. A kernel of ten lines shows that. In "some values zero" it finds nothing.
    [ "$tool" = racecheck ] ||
        for filter in "moments: bits 3, dim 128, group 12" "12 rows, whole pages, bits 3 dim 128" "7 heads of 12, bits 3" "20 in long sequences, bits 3" \
            "32 of 44 segments, bits 4" "tiles of rows, bits 4" "tiles of rows, bits 5310" \
            "variance term, moments: bits 2, dim 128, group 12" "variance term, no moments: ragged, chunks, group 12"; do
            run "$tool" attend check "$filter"
        done
    run "$tool" attend check "many rows: some values zero"
    for filter in "one token" "33 query tokens" "dim 64, bits 5312/3" "dim 96, bits 4/3" "everything, wave, metric 5" "absent pages, bf16, wave" \
        "soft-cap and variance term, wave"; do
        run "$tool" chunk check "$filter" # Hopper alone
    done
    for path in hopper hopper-line portable; do
        for filter in "bits 4 dim 128" "bits 3 dim 80" "bits 2 dim 64" "window" "mixed" "dense" "group 16 bits 3" "ragged batch" \
            "fine, everything" "fine, group" "fine 85321" "fine, not causal" "moments: bits 3, dim 256, group 4" \
            "ragged: 4 bits, dim 128, group 4, wave" "ragged: 5310 bits, dim 64, group 12" "ragged: pages of 96" \
            "absent pages, bits 4, dim 128, group 4, uneven" "absent pages, bits 5310, dim 64, group 33, uneven" \
            "variance term, moments: bits 3, dim 128, group 7" "variance term, moments: ragged, group 4" \
            "variance term, no moments: dim 512" "wide: bits 3, dim 512" "wide: bits 5310, dim 320, wave" \
            "wide: ragged, chunks, dim 320" "wide: absent pages, heads, dim 320"; do
            # Not for racecheck: its chunks have many rows, whose warps meet at named barriers (above).
            [ "$tool $path $filter" = "racecheck hopper ragged: 4 bits, dim 128, group 4, wave" ] ||
                TURBOQUANT_CUDA_PATH=$path run "$tool" attend check "$filter"
        done
    done
    for filter in "some values zero" "4 queries" "rising logits"; do # wgmma: Hopper alone
        TURBOQUANT_CUDA_PATH=hopper-line run "$tool" attend check "many rows: $filter"
    done
    for filter in "length 33" "queries, fresh, \"tables" "a wave alone"; do run "$tool" attend_baseline "$filter"; done
    TQ_THIN=400 run "$tool" append check
done
wait
failures=$((count - $(find "$pages" -name 'page_*.passed' | wc -l)))
echo "$failures of $count runs failed"
exit $((failures > 0))
