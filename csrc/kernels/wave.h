/* What a wave adds to the scores of a page, written once for every unit. tq_wave in core/kernels.h says how it is split. */
#ifndef TQ_KERNELS_WAVE_H
#define TQ_KERNELS_WAVE_H
#include "vector.h"

#define TQ_WAVE_ROWS 4

TQ_INLINE tq_floats tq_reversed(tq_floats x)
{
    tq_floats y;
    for (int i = 0; i < TQ_LANES; i++) y[i] = x[TQ_LANES - 1 - i];
    return y;
}

/** Coefficients of a row at position 0, to those of even and odd parts around the middle of a page. */
TQ_INLINE void tq_turn_row(const tq_wave *wave, const float *row, const float *turn, float *even, float *odd)
{
    for (int32_t i = 0; i < wave->padded; i += TQ_LANES) {
        tq_floats along = tq_load_floats(row + i), across = tq_load_floats(row + wave->padded + i);
        tq_floats cosine = tq_load_floats(turn + i), sine = tq_load_floats(turn + wave->padded + i);
        tq_store_floats(even + i, tq_fused(along, cosine, across * sine));
        tq_store_floats(odd + i, tq_fused(across, cosine, along * -sine));
    }
}

/** `rows` is a constant once inlined. */
TQ_INLINE void tq_add_wave_rows(const int rows, const tq_wave *wave, const float *coefficients, const float *turn,
                                const float *key_scales, float *scores, int32_t stride)
{
    float even[TQ_WAVE_ROWS][TQ_MAX_HEAD_DIM / 2 + 16], odd[TQ_WAVE_ROWS][TQ_MAX_HEAD_DIM / 2 + 16];
    int32_t half = wave->half;
    for (int r = 0; r < rows; r++)
        tq_turn_row(wave, coefficients + 2 * (int64_t)wave->padded * r, turn, even[r], odd[r]);
    for (int32_t c = 0; c < half; c += TQ_LANES) {
        const float *cosines = wave->table + c, *sines = cosines + (int64_t)wave->pairs * half;
        tq_floats e[TQ_WAVE_ROWS] = {0}, o[TQ_WAVE_ROWS] = {0};
        for (int32_t i = 0; i < wave->pairs; i++, cosines += half, sines += half) {
            tq_floats cosine = tq_load_floats(cosines), sine = tq_load_floats(sines);
            TQ_UNROLL
            for (int r = 0; r < rows; r++) {
                e[r] = tq_fused(tq_all(even[r][i]), cosine, e[r]);
                o[r] = tq_fused(tq_all(odd[r][i]), sine, o[r]);
            }
        }
        int32_t right = half + c, left = half - c - TQ_LANES;
        TQ_UNROLL
        for (int r = 0; r < rows; r++) {
            float *of_row = scores + (int64_t)r * stride;
            tq_store_floats(of_row + right,
                            tq_fused(tq_load_floats(of_row + right), tq_load_floats(key_scales + right), e[r] + o[r]));
            tq_store_floats(of_row + left, tq_fused(tq_load_floats(of_row + left), tq_load_floats(key_scales + left),
                                                    tq_reversed(e[r] - o[r])));
        }
    }
}

static inline void tq_add_wave(const tq_wave *wave, int64_t page, const float *coefficients, int32_t rows,
                               const float *key_scales, float *scores, int32_t stride)
{
    const float *turn = wave->turns + 2 * (page - wave->first_page) * wave->padded;
    int64_t row = 2 * (int64_t)wave->padded;
    for (; rows >= TQ_WAVE_ROWS; rows -= TQ_WAVE_ROWS) {
        tq_add_wave_rows(TQ_WAVE_ROWS, wave, coefficients, turn, key_scales, scores, stride);
        coefficients += TQ_WAVE_ROWS * row;
        scores += TQ_WAVE_ROWS * (int64_t)stride;
    }
    for (; rows > 0; rows--, coefficients += row, scores += stride)
        tq_add_wave_rows(1, wave, coefficients, turn, key_scales, scores, stride);
}
#endif
