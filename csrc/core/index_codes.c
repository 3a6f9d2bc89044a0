/* Rows of an index: encoding and decoding. turboquant_index.h has the layout. */
#include "index_internal.h"
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* ---- fields: bits w k .. w k + w - 1 of byte i are of channel i + 4 w k ---- */

/** Returns the bits of eight codes from bit `shift` on, a byte for each code. mask: the bits of a byte. */
static inline uint64_t eight_codes(const uint8_t *codes, int32_t shift, uint64_t mask)
{
    uint64_t word;
    memcpy(&word, codes, 8);
    return word >> shift & mask * 0x0101010101010101;
}

static void pack_field(const uint8_t codes[32], int32_t width, int32_t shift, uint8_t *bytes)
{
    uint64_t word = 0;
    switch (width) {
    case 8: memcpy(bytes, codes, 32); return;
    case 4:
        for (int32_t at = 0; at < 16; at += 8) {
            word = eight_codes(codes + at, shift, 15) | eight_codes(codes + 16 + at, shift, 15) << 4;
            memcpy(bytes + at, &word, 8);
        }
        return;
    case 2:
        for (int32_t k = 0; k < 4; k++) word |= eight_codes(codes + 8 * k, shift, 3) << 2 * k;
        memcpy(bytes, &word, 8);
        return;
    default: /* eight codes become bits k and k + 1 of four bytes */
        for (int32_t k = 0; k < 8; k += 2) word |= eight_codes(codes + 4 * k, shift, 1) << k;
        word |= word >> 31; /* the upper four bytes, one bit higher */
        memcpy(bytes, &word, 4);
    }
}

/** Packs a field of 8 codes: width bytes, bits w k .. w k + w - 1 of byte i are of channel i + w k. */
static void pack_eight(const uint8_t codes[8], int32_t width, int32_t shift, uint8_t *bytes)
{
    uint64_t word = eight_codes(codes, shift, (1u << width) - 1), packed = 0;
    for (int32_t k = 0; k < 8; k += width) packed |= word >> 8 * k << k;
    memcpy(bytes, &packed, (size_t)width); /* the bytes behind are cut off */
}

/** Packs the lowest `bits` of `channels` codes, 32 or 8. Returns where the next bytes go. */
static uint8_t *pack_row(const uint8_t *codes, int32_t channels, int32_t bits, uint8_t *bytes)
{
    int32_t shift = 0;
    for (int32_t width = 8; width; width /= 2)
        if (bits & width) {
            if (channels == 32) pack_field(codes, width, shift, bytes);
            else pack_eight(codes, width, shift, bytes);
            bytes += channels / 8 * width;
            shift += width;
        }
    return bytes;
}

/** Packs the leading bits of `channels` codes, 32 or 8, as bytes TQ_INDEX_BLOCK apart. Returns the next plane. */
static uint8_t *pack_lead(const uint8_t *codes, int32_t channels, int32_t bits, int32_t lead, uint8_t *plane)
{
    for (int32_t width; lead; lead -= width, bits -= width) {
        uint8_t bytes[8];
        width = lead > 1 ? 2 : 1;
        if (channels == 32) pack_field(codes, width, bits - width, bytes);
        else pack_eight(codes, width, bits - width, bytes);
        for (int32_t i = 0; i < channels / 8 * width; i++, plane += TQ_INDEX_BLOCK) *plane = bytes[i];
    }
    return plane;
}

/* ---- encoding ---- */

typedef struct {
    tq_index_use use;
    const float *x;
    int64_t n;
    const int32_t *lists; /* [n], or NULL */
    uint8_t *codes, *signs;
    float *scales, *offsets;
    float *workspace; /* [threads, 2, 64, padded]; with lists [threads, 3, 64, padded] */
    /* by code, if all groups have the same bits, lead and step: its level, and its estimate under each bound */
    float levels[256], estimates[2][256];
    double expected[2];     /* mean squared noise under each bound; 0: it is not measured */
    atomic_llong first_bad; /* the first row that is refused, or n */
} encode_job;

static void pack_all(const encode_job *job, int64_t row, const uint8_t *codes)
{
    const tq_index_layout *layout = &job->use.space->layout;
    uint8_t *to = job->codes + row * job->use.row_bytes;
    uint8_t *plane = job->signs + row / TQ_INDEX_BLOCK * TQ_INDEX_BLOCK * job->use.planes + row % TQ_INDEX_BLOCK;
    for (int32_t j = 0, size; j < layout->channels; j += size, codes += size) {
        int32_t bits = layout->bits[j / 32], lead = layout->lead[j / 32];
        size = layout->channels - j / 32 * 32 < 32 ? 8 : 32;
        to = pack_row(codes, size, bits - lead, to);
        plane = pack_lead(codes, size, bits, lead, plane);
    }
}

/* ---- noise classes ---- */

static const double NOISE[TQ_INDEX_NOISE_CLASSES] = {1, 1.2, 1.5, 1.9, 2.4, 3.2, 4.5, INFINITY};

/** Returns the noise class of a row under the first or second bound, which multiplies the scale by `factor`. The square
 *  of the noise is the sum of w_j e_j^2 divided by E[e^2]: w_j = x_j^2 / |x|^2, and e are the residuals of all codes,
 *  rotated back. x [padded]: the centred row. workspace: [padded]. */
static uint32_t noise_class(const encode_job *job, int32_t bound, float factor, const float *x, const uint8_t *codes,
                            float *workspace)
{
    const tq_index_use *use = &job->use;
    float inverse = 1 / factor;
    double weights[8] = {0}, sums[8] = {0}, weight = 0, sum = 0;
    for (int32_t j = 0; j < use->channels; j++)
        workspace[j] = job->levels[codes[j]] * inverse - job->estimates[bound][codes[j]];
    tq_rotate_vector(use->kernels, use->space->plan, use->space->plan->rotation, NULL, 1, workspace, workspace);
    for (int32_t j = 0; j < use->channels; j += 8)
        for (int32_t k = 0; k < 8; k++) {
            double w = (double)x[j + k] * x[j + k];
            weights[k] += w;
            sums[k] += w * workspace[j + k] * workspace[j + k];
        }
    for (int32_t k = 0; k < 8; k++) {
        weight += weights[k];
        sum += sums[k];
    }
    uint32_t noise_class = 0;
    while (noise_class + 1 < TQ_INDEX_NOISE_CLASSES &&
           sum > weight * job->expected[bound] * NOISE[noise_class] * NOISE[noise_class])
        noise_class++;
    return noise_class;
}

/** Returns the float nearest to `scale` whose lowest 9 bits hold k and the noise class. */
static float with_classes(float scale, uint32_t noise_class, int32_t k)
{
    uint32_t classes = ((uint32_t)k & 63) << 3 | noise_class;
    uint32_t word;
    if (!(scale > 0 && scale <= FLT_MAX)) return scale;
    memcpy(&word, &scale, sizeof word);
    word = ((word + 256 - classes) & ~(uint32_t)511) | classes;
    memcpy(&scale, &word, sizeof word);
    return scale;
}

/** Returns the larger noise class of both bounds. */
static uint32_t largest_class(const encode_job *job, int32_t k, const float *x, const uint8_t *codes, float *workspace)
{
    const float factors[2] = {1 + (float)k / 64,
                              tq_index_next_factor(job->use.layout.even_bits, with_classes(1, 0, k))};
    uint32_t largest = 0;
    for (int32_t bound = 0; bound < 2; bound++) {
        if (!(job->expected[bound] > 0)) continue;
        uint32_t own = noise_class(job, bound, factors[bound], x, codes, workspace);
        if (own > largest) largest = own;
    }
    return largest;
}

/** Returns k of a row (turboquant_index.h). z [padded]: the rotated row. */
static int32_t leading_class(const encode_job *job, const float *z, const uint8_t *codes)
{
    double levels[8] = {0}, estimates[8] = {0}, level = 0, estimate = 0;
    for (int32_t j = 0; j < job->use.channels; j += 8)
        for (int32_t i = 0; i < 8; i++) {
            levels[i] += (double)z[j + i] * job->levels[codes[j + i]];
            estimates[i] += (double)z[j + i] * job->estimates[0][codes[j + i]];
        }
    for (int32_t i = 0; i < 8; i++) {
        level += levels[i];
        estimate += estimates[i];
    }
    if (!(level > 0 && estimate > 0)) return 0;
    double k = rint(64 * (level / estimate - 1));
    return k < -32 ? -32 : k > 31 ? 31 : (int32_t)k;
}

static void prepare_classes(encode_job *job)
{
    const tq_index_use *use = &job->use;
    const tq_index_layout *layout = &use->space->layout;
    for (int32_t g = 0; g < tq_index_groups(layout); g++)
        if (layout->bits[g] != layout->bits[0] || layout->lead[g] != layout->lead[0] ||
            layout->steps[g] != layout->steps[0])
            return;
    for (int32_t bound = 0; bound <= use->layout.next; bound++) {
        tq_index_estimates(layout->bits[0], layout->lead[0] + bound, job->levels, job->estimates[bound]);
        double expected = tq_index_lead_error(layout->bits[0], layout->lead[0] + bound);
        if (!use->space->matrix && use->planes) job->expected[bound] = expected < 1e-9 ? 0 : expected;
    }
}

static void note_bad(encode_job *job, int64_t row)
{
    long long known = atomic_load(&job->first_bad);
    while (row < known && !atomic_compare_exchange_weak(&job->first_bad, &known, row)) {}
}

/** Returns <R c, what the codes of a row stand for> with c = centre [padded]. workspace: [padded]. */
static double of_centre(const encode_job *job, const uint8_t *codes, float scale, const float *centre, float *workspace)
{
    const tq_index_layout *layout = &job->use.space->layout;
    double sums[8] = {0}, all = 0;
    tq_index_rotate(&job->use, centre, 1, workspace);
    for (int32_t j = 0; j < layout->channels; j += 8) {
        int32_t bits = layout->bits[j / 32];
        const tq_index_book *book = &tq_index_books()[bits];
        double step = (double)layout->steps[j / 32] * book->step;
        for (int32_t k = 0; bits && k < 8; k++) {
            int32_t code = codes[j + k], level = book->n_levels ? book->levels[code] : code - 128;
            sums[k] += workspace[j + k] * (level * step);
        }
    }
    for (int32_t k = 0; k < 8; k++) all += sums[k];
    return all * scale;
}

static void encode_block(void *context, int64_t block, int32_t worker)
{
    encode_job *job = context;
    const tq_index_use *use = &job->use;
    int64_t first = TQ_INDEX_BLOCK * block;
    int32_t rows = job->n - first < TQ_INDEX_BLOCK ? (int32_t)(job->n - first) : TQ_INDEX_BLOCK;
    float *centred = job->workspace + (int64_t)worker * (job->lists ? 3 : 2) * TQ_INDEX_BLOCK * use->padded;
    float *z = centred + TQ_INDEX_BLOCK * use->padded, *centres = z + TQ_INDEX_BLOCK * use->padded;
    double offsets[TQ_INDEX_BLOCK], offset, squares;
    uint8_t codes[TQ_MAX_DIM];
    if (rows < TQ_INDEX_BLOCK) memset(job->signs + first * use->planes, 0, (size_t)use->planes * TQ_INDEX_BLOCK);
    for (int32_t i = 0; i < rows; i++) {
        float *to = centred + (int64_t)i * use->padded;
        if (!tq_index_centre(use, job->x + (first + i) * use->space->dim, to, &offset, &squares)) {
            note_bad(job, first + i);
            return;
        }
        if (job->lists) {
            memcpy(z, to, sizeof(float) * (size_t)use->padded);
            const int32_t list = job->lists[first + i],
                          last = use->space->n_lists - 1; /* see list_value, index_scan.c */
            tq_index_centre_on_list(use, z, (uint32_t)list < (uint32_t)last ? list : last, to, &offset, &squares,
                                    centres + (int64_t)i * use->padded);
        }
        offsets[i] = use->space->metric == TQ_INDEX_L2 ? -squares / 2 : offset;
    }
    tq_index_rotate(use, centred, rows, z);
    for (int32_t i = 0; i < rows; i++) {
        float *row = z + (int64_t)i * use->padded, scale = use->scan->encode(&use->layout, row, codes);
        const float *x = centred + (int64_t)i * use->padded;
        int32_t k = use->layout.sized ? leading_class(job, row, codes) : 0;
        job->scales[first + i] = use->planes ? with_classes(scale, largest_class(job, k, x, codes, row), k) : scale;
        pack_all(job, first + i, codes);
        if (job->lists)
            offsets[i] -= of_centre(job, codes, job->scales[first + i], centres + (int64_t)i * use->padded, row);
        if (job->offsets) job->offsets[first + i] = (float)offsets[i];
    }
}

tq_status tq_index_encode(const tq_index_space *space, const float *x, int64_t n, const int32_t *lists, uint8_t *codes,
                          uint8_t *signs, float *scales, float *offsets, int32_t threads, tq_error *error)
{
    encode_job job = {.x = x, .n = n, .codes = codes, .signs = signs, .scales = scales, .offsets = offsets};
    TQ_TRY(tq_index_begin(space, &job.use, error));
    if (!offsets && (space->mean || space->n_lists || space->metric == TQ_INDEX_L2))
        return tq_refuse(error, "offsets", 0, "given, with a mean, lists or l2");
    if (!lists != !space->n_lists)
        return tq_refuse(error, "lists", space->n_lists, "given if there are lists, and only then");
    job.lists = lists;
    int64_t blocks = (n + TQ_INDEX_BLOCK - 1) / TQ_INDEX_BLOCK;
    threads = tq_effective_threads(tq_threads_for(threads, n, 4 * TQ_INDEX_BLOCK));
    job.workspace = malloc(sizeof(float) * (lists ? 3 : 2) * TQ_INDEX_BLOCK * (size_t)threads * (size_t)job.use.padded);
    if (!job.workspace)
        return tq_fail(error, TQ_E_MEMORY, "threads", -1, threads, "few enough for the memory there is");
    prepare_classes(&job);
    atomic_init(&job.first_bad, n);
    tq_parallel(blocks, threads, encode_block, &job);
    free(job.workspace);
    int64_t bad = atomic_load(&job.first_bad);
    return bad < n ? tq_index_refused(&job.use, x, bad, error) : TQ_OK;
}

tq_status tq_index_decode(const tq_index_layout *layout, const uint8_t *codes, const uint8_t *signs,
                          const float *scales, int64_t n, float *z, tq_error *error)
{
    int64_t row_bytes;
    int32_t planes;
    TQ_TRY(tq_index_row_bytes(layout, &row_bytes, &planes, error));
    const tq_scan_kernels *kernels = tq_get_scan_kernels(error);
    if (!kernels) return TQ_E_UNSUPPORTED;
    tq_scan_layout scan = tq_index_scan_layout(layout);
    float steps[TQ_MAX_GROUPS];
    for (int32_t g = 0; g < scan.groups; g++) steps[g] = layout->steps[g] * scan.books[layout->bits[g]].step;
    int16_t levels[TQ_MAX_DIM];
    for (int64_t i = 0; i < n; i++, z += layout->channels) {
        kernels->unpack(&scan, codes + i * row_bytes, signs + i * planes, levels);
        for (int32_t j = 0; j < layout->channels; j++) z[j] = (float)levels[j] * steps[j / 32] * scales[i];
    }
    return TQ_OK;
}

void tq_index_factors(const float *scales, const float *offsets, int64_t n, float *factors)
{
    for (int64_t first = 0; first < n; first += TQ_INDEX_BLOCK, factors += 2) {
        int64_t end = n - first < TQ_INDEX_BLOCK ? n : first + TQ_INDEX_BLOCK;
        float scale = 0, offset = offsets ? offsets[first] : 0;
        for (int64_t i = first; i < end; i++) {
            float own = tq_leading_scale(scales[i]);
            scale = own > scale ? own : scale;
            if (offsets) offset = offsets[i] > offset ? offsets[i] : offset;
        }
        factors[0] = scale > 0 ? 1 / scale : 0;
        factors[1] = offset;
    }
}
