/* Rows of an index: encoding and decoding. turboquant_index.h has the layout. */
#include "index_internal.h"
#include <math.h>
#include <string.h>

static int coded(const tq_index_layout *layout, int32_t g) { return layout->bits[g] != 0; }

tq_status tq_index_row_bytes(const tq_index_layout *layout, int64_t *bytes, int32_t *planes, tq_error *error)
{
    if (layout->groups < 1 || layout->groups > TQ_MAX_GROUPS)
        return tq_fail(error, TQ_E_VALUE, "groups", -1, layout->groups, "in 1..128");
    int64_t sum = 0;
    *planes = 0;
    for (int32_t g = 0; g < layout->groups; g++) {
        if (layout->bits[g] > TQ_SCAN_BITS && layout->bits[g] != TQ_WIDE_BITS)
            return tq_fail(error, TQ_E_VALUE, "bits", g, layout->bits[g], "in 0..6 or 8");
        if (!(layout->steps[g] > 0) || !isfinite(layout->steps[g]))
            return tq_fail(error, TQ_E_VALUE, "steps", g, layout->steps[g], "finite and above 0");
        if (!layout->bits[g]) continue;
        sum += layout->bits[g] - 1;
        *planes += 4;
    }
    if (!*planes) return tq_fail(error, TQ_E_VALUE, "bits", -1, 0, "above 0 in some group");
    *bytes = 4 * sum;
    return TQ_OK;
}

void tq_index_levels(const tq_index_layout *layout, tq_scan_layout *scan)
{
    memset(scan, 0, sizeof *scan);
    scan->layout = layout;
    for (int32_t bits = 1; bits <= TQ_SCAN_BITS; bits++) {
        tq_index_book book;
        tq_get_index_book(bits, &book);
        memcpy(scan->levels[bits], book.levels, sizeof book.levels);
    }
}

void tq_get_index_book(int32_t bits, tq_index_book *out)
{
    memset(out, 0, sizeof *out);
    out->n_levels = 1 << bits;
    if (bits == TQ_SCAN_BITS) {
        tq_six_bit_levels(out->levels, &out->step);
        for (int32_t rank = 0; rank < 63; rank++)
            out->thresholds[rank] = (float)(out->levels[rank] + out->levels[rank + 1]) * (0.5f * out->step);
        return;
    }
    tq_codebook book;
    tq_get_codebook(TQ_CODEBOOK_NORMAL, 0, bits, &book, NULL); /* cannot fail for these widths */
    out->step = book.step;
    for (int32_t rank = 0; rank < book.n_levels; rank++) out->levels[rank] = book.levels[book.code_of_rank[rank]];
    memcpy(out->thresholds, book.thresholds, sizeof book.thresholds);
}

float tq_index_step(int32_t bits)
{
    if (bits < 1 || bits > TQ_SCAN_BITS) return bits == TQ_WIDE_BITS ? TQ_WIDE_STEP : 0;
    tq_index_book book;
    tq_get_index_book(bits, &book);
    return book.step;
}

/* The rank of u, and its level in units of u. */
static uint8_t quantize(const tq_index_book *book, float u, float *level)
{
    if (!book->n_levels) { /* 8 bits */
        float code = rintf(u / TQ_WIDE_STEP) + 128.0f;
        code = code < 1 ? 1 : code > 255 ? 255 : code;
        *level = (code - 128.0f) * TQ_WIDE_STEP;
        return (uint8_t)code;
    }
    int32_t rank = 0;
    for (int32_t i = 0; i + 1 < book->n_levels; i++) rank += u >= book->thresholds[i];
    *level = (float)book->levels[rank] * book->step;
    return (uint8_t)rank;
}

static uint8_t *pack_field(const uint8_t codes[32], int32_t width, int32_t shift, uint8_t *bytes)
{
    int32_t n = 4 * width, mask = (1 << width) - 1;
    for (int32_t i = 0; i < n; i++) {
        int32_t byte = 0;
        for (int32_t k = 0; k < 8 / width; k++) byte |= (codes[n * k + i] >> shift & mask) << width * k;
        bytes[i] = (uint8_t)byte;
    }
    return bytes + n;
}

static uint8_t *pack(const uint8_t codes[32], int32_t bits, uint8_t *bytes)
{
    int32_t shift = 0;
    for (int32_t width = 8; width; width /= 2)
        if (bits & width) {
            bytes = pack_field(codes, width, shift, bytes);
            shift += width;
        }
    return bytes;
}

typedef struct {
    const tq_index_layout *layout;
    const float *z;
    int64_t n, row_bytes;
    int32_t planes;
    uint8_t *codes, *signs;
    float *scales;
    tq_index_book books[TQ_WIDE_BITS + 1];
} encode_job;

/** signs: the row's byte of the first plane. */
static void encode_row(const encode_job *job, const float *z, uint8_t *row, uint8_t *signs, float *scale)
{
    const tq_index_layout *layout = job->layout;
    double sum = 0, exact = 0, product = 0;
    int32_t channels = 0;
    for (int32_t g = 0; g < layout->groups; g++)
        for (int32_t i = 0; coded(layout, g) && i < 32; i++, channels++) {
            float t = z[32 * g + i] / layout->steps[g];
            sum += (double)t * t;
        }
    double rms = sqrt(sum / channels);
    float inverse = rms > 0 ? (float)(1 / rms) : 0;
    for (int32_t g = 0; g < layout->groups; g++) {
        if (!coded(layout, g)) continue;
        double weight = (double)layout->steps[g] * layout->steps[g];
        uint8_t codes[32];
        for (int32_t i = 0; i < 32; i++) {
            float level, u = z[32 * g + i] / layout->steps[g] * inverse;
            codes[i] = quantize(&job->books[layout->bits[g]], u, &level);
            exact += weight * u * u;
            product += weight * u * level;
        }
        row = pack(codes, layout->bits[g] - 1, row);
        uint8_t leading[4];
        pack_field(codes, 1, layout->bits[g] - 1, leading);
        for (int32_t i = 0; i < 4; i++, signs += TQ_INDEX_BLOCK) *signs = leading[i];
    }
    *scale = product > 0 ? (float)(rms * (exact / product)) : 0;
}

static void encode_block(void *context, int64_t run, int32_t worker)
{
    const encode_job *job = context;
    int64_t first = TQ_INDEX_BLOCK * run, end = first + TQ_INDEX_BLOCK < job->n ? first + TQ_INDEX_BLOCK : job->n;
    uint8_t *block = job->signs + first * job->planes;
    (void)worker;
    if (end < first + TQ_INDEX_BLOCK) memset(block, 0, (size_t)job->planes * TQ_INDEX_BLOCK);
    for (int64_t i = first; i < end; i++)
        encode_row(job, job->z + 32 * i * job->layout->groups, job->codes + i * job->row_bytes, block + (i - first),
                   job->scales + i);
}

tq_status tq_index_encode(const tq_index_layout *layout, const float *z, int64_t n, uint8_t *codes, uint8_t *signs,
                          float *scales, int32_t threads, tq_error *error)
{
    encode_job job = {.layout = layout, .z = z, .n = n, .codes = codes, .signs = signs, .scales = scales};
    TQ_TRY(tq_index_row_bytes(layout, &job.row_bytes, &job.planes, error));
    for (int64_t i = 0; i < 32 * n * layout->groups; i++)
        if (!isfinite(z[i])) return tq_fail(error, TQ_E_VALUE, "z", i, z[i], "finite");
    for (int32_t bits = 1; bits <= TQ_SCAN_BITS; bits++) tq_get_index_book(bits, &job.books[bits]);
    tq_parallel((n + TQ_INDEX_BLOCK - 1) / TQ_INDEX_BLOCK, threads, encode_block, &job);
    return TQ_OK;
}

tq_status tq_index_decode(const tq_index_layout *layout, const uint8_t *codes, const uint8_t *signs,
                          const float *scales, int64_t n, float *z, tq_error *error)
{
    int64_t row_bytes;
    int32_t planes;
    TQ_TRY(tq_index_row_bytes(layout, &row_bytes, &planes, error));
    const tq_scan_kernels *kernels = tq_get_scan_kernels(error);
    if (!kernels) return TQ_E_UNSUPPORTED;
    tq_scan_layout scan;
    tq_index_levels(layout, &scan);
    float steps[TQ_MAX_GROUPS];
    for (int32_t g = 0; g < layout->groups; g++) steps[g] = layout->steps[g] * tq_index_step(layout->bits[g]);
    int16_t levels[TQ_MAX_DIM];
    for (int64_t i = 0; i < n; i++, z += 32 * layout->groups) {
        kernels->unpack(&scan, codes + i * row_bytes, signs + i * planes, levels);
        for (int32_t j = 0; j < 32 * layout->groups; j++) z[j] = (float)levels[j] * steps[j / 32] * scales[i];
    }
    return TQ_OK;
}
