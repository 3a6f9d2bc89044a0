// tq_cuda_append: checks, the choice of a kernel (append/params.cuh lists them), and copies of tokens that stay exact.
#include <math.h>
#include <stdio.h>

#include "cuda/append/params.cuh"
#include "cuda/tile/codebooks.h"

namespace tq
{
namespace
{

constexpr int FEW_TOKENS = 32; // up to this many: one launch, one thread block per (side, sequence, head)
constexpr int COPY_WARPS = 4;

/** Copies the new tokens that stay exact, one warp per token. Runs after all tokens that leave the ring are packed. */
template <int PER_LANE>
__global__ void __launch_bounds__(32 * COPY_WARPS) copy_exact(const __grid_constant__ AppendArgs a, int blocks)
{
    const Work work = work_of(a, blockIdx.x / (unsigned)blocks);
    wait_for_stream();
    const Span span = span_of(a, work.b);
    const int r = (int)(blockIdx.x % (unsigned)blocks * COPY_WARPS + threadIdx.x / 32);
    copy_exact_row<PER_LANE>(a, work, head_of(a, work), span, r, threadIdx.x % 32);
}

tq_status launch_copy_exact(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    const int64_t blocks = (exact_rows(args) + COPY_WARPS - 1) / COPY_WARPS;
    return launch(args.head_dim > 256 ? copy_exact<16> : copy_exact<8>,
                  (int64_t)args.sides * args.batch * args.kv_heads * blocks, 32 * COPY_WARPS, 0, stream, error, args,
                  (int)blocks);
}

// ---- checks ----

/** Checks the limits that only CUDA has: its head_dim, and sizes that fit its 32-bit indices. */
tq_status check_limits(const tq_plan &plan, const tq_append_params &p, tq_error *error)
{
    TQ_CUDA_TRY(check_plan(plan, error));
    const int64_t items = 2 * (int64_t)p.layer.batch * p.layer.kv_heads;
    if (items > INT32_MAX)
        return fail(error, TQ_E_VALUE, "batch", -1, p.layer.batch, "such that 2 * batch * kv_heads is below 2^31");
    if ((int64_t)p.layer.sinks + p.layer.window > INT32_MAX / 2)
        return fail(error, TQ_E_VALUE, "window", -1, p.layer.window, "such that sinks + window is below 2^30");
    return TQ_OK;
}

bool has_tokens(const tq_append_params &p)
{
    return p.layer.batch && p.layer.kv_heads && p.tokens && (!p.query_start_loc || p.total_tokens);
}

// ---- arguments ----

AppendSide side_of(const tq_plan &plan, const tq_append_params &p, bool is_value)
{
    const tq_side &from = is_value ? plan.value : plan.key;
    const tq_transform &transform = is_value ? p.layer.value : p.layer.key;
    const int64_t bytes = p.layer.dtype == TQ_F32 ? 4 : 2;
    AppendSide side = {};
    side.fresh = (const char *)(is_value ? p.v : p.k);
    side.ring = (char *)(is_value ? p.layer.window_v : p.layer.window_k);
    side.sinks = (char *)(is_value ? p.layer.sink_v : p.layer.sink_k);
    side.stride_batch = p.query_start_loc ? 0 : bytes * (is_value ? p.v_stride_batch : p.k_stride_batch);
    side.stride_head = bytes * (is_value ? p.v_stride_head : p.k_stride_head);
    side.stride_token = bytes * (is_value ? p.v_stride_token : p.k_stride_token);
    side.rotation = transform.rotation;
    side.rotation_stride_head = transform.rotation_stride_head;
    side.numbers_stride_head = transform.stride_head;
    side.centre = transform.centre;
    side.steps = transform.steps;
    for (int group = 0; group < PLAN_GROUPS; group++) {
        side.bits[group] = from.bits[group];
        side.offset[group] = from.offset[group];
    }
    for (int group = 0; group < plan.groups; group++) side.widths |= 1u << from.bits[group];
    const bool varies = plan.head_dim % TQ_TILE || transform.steps || !tq_has_one_width(&from);
    side.one_width = varies || from.bits[0] > 5 ? 0 : from.bits[0];
    side.tile_bytes = from.tile_bytes;
    side.codes_offset = (int32_t)from.codes_offset;
    side.scales_offset = (int32_t)from.scales_offset;
    side.coded_channels = (float)from.coded_channels;
    return side;
}

void fill_books(const tq_codebook *books, Books *to)
{
    for (int bits = 1; bits <= TQ_MAX_BITS; bits++) make_book(books[bits], &to->bits[bits]);
}

tq_status make_args(const tq_plan &plan, const tq_append_params &p, int64_t *flag, AppendArgs *args, tq_error *error)
{
    *args = {};
    args->batch = p.layer.batch;
    args->tokens = p.tokens;
    args->kv_heads = p.layer.kv_heads;
    args->total_tokens = p.total_tokens;
    args->sinks = tq_unpacked_sinks(&p.layer);
    args->window = tq_unpacked_window(&p.layer);
    if (tq_is_indexed(&p.layer))
        args->rows = {p.layer.sink_rows,   p.layer.tail_rows,
                      p.layer.sinks,       p.layer.tail_rows ? p.layer.tail_slots : 0,
                      p.layer.n_sink_rows, p.layer.n_tail_rows};
    args->max_pages = p.layer.max_pages;
    args->dtype = p.layer.dtype;
    args->head_dim = plan.head_dim;
    args->groups = plan.groups;
    args->tile_tokens = plan.tile_tokens;
    args->rotation = plan.rotation;
    args->scale = plan.scale;
    args->sides = plan.value.tile_bytes ? 2 : 1;
    const int64_t capacity = tq_capacity(&plan, &p.layer);
    if (capacity > INT32_MAX / 2) // sums of positions and tiles are 32-bit; attend refuses more as well
        return fail(error, TQ_E_VALUE, "max_pages", -1, p.layer.max_pages, "fewer: positions are 32-bit");
    args->capacity = (int32_t)capacity;
    int power = 8;
    while (2 * power <= plan.head_dim) power *= 2;
    args->factor = (float)(1.0 / sqrt((double)power));
    args->tries = plan.tries;
    for (int i = 0; i < plan.tries; i++) args->factors[i] = tq_tries(plan.tries)[i];
    args->heads = divisor_of(p.layer.kv_heads);
    args->batches = divisor_of(p.layer.batch);
    args->window_slots = divisor_of(tq_window_slots(&p.layer));
    args->page_tokens = divisor_of(plan.page_tokens);
    args->n_pages = p.layer.n_pages;
    args->page_bytes = tq_page_stride(&plan, &p.layer);
    args->record_bytes = plan.record_bytes;
    args->row_bytes = (int64_t)plan.head_dim * (p.layer.dtype == TQ_F32 ? 4 : 2);
    args->lengths = p.layer.lengths;
    args->block_table = p.layer.block_table;
    args->query_start_loc = p.query_start_loc;
    args->position_offset = p.layer.position_offset;
    args->pages = p.layer.pages;
    args->flag = flag;
    args->side[0] = side_of(plan, p, false);
    args->side[1] = side_of(plan, p, true);
    args->moments = key_moments_of(plan, p.layer.key);
    args->signs = signs_of(plan);
    const Books &books = of_codebooks<Books>(plan, fill_books);
    for (int bits = 1; bits <= TQ_MAX_BITS; bits++) args->books[bits] = books.bits[bits];
    return TQ_OK;
}

tq_status launch_append_prefill(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    if (args.moments.any())
        return args.tries ? Prefill<3>::queue(args, stream, error) : Prefill<2>::queue(args, stream, error);
    return args.tries ? Prefill<1>::queue(args, stream, error) : Prefill<0>::queue(args, stream, error);
}

// ---- the choice ----

enum class Kernel { BASELINE, ONE_TOKEN, GENERAL, PREFILL };
const char *const NAMES[] = {"append_baseline", "append_one_token", "append_general", "append_prefill"};

/** Whether rows have 16-bit numbers and no steps, and can be read 16 bytes at a time. */
bool rows_suit_tiles(const tq_append_params &p)
{
    const int64_t strides =
        p.k_stride_batch | p.k_stride_head | p.k_stride_token | p.v_stride_batch | p.v_stride_head | p.v_stride_token;
    const uintptr_t pointers =
        (uintptr_t)p.k | (uintptr_t)p.v | (uintptr_t)p.layer.window_k | (uintptr_t)p.layer.window_v;
    return p.layer.dtype != TQ_F32 && !p.layer.key.steps && !p.layer.value.steps && strides % 8 == 0 &&
           pointers % 16 == 0;
}

/** Whether append_prefill supports a plan with settled rows: its tiles, rotation, head_dim, scale and widths. */
bool plan_suits_tiles(const tq_plan &plan)
{
    if (tq_tile_is_16(&plan) || plan.rotation != TQ_ROTATION_HADAMARD || plan.head_dim > 256) return false;
    if (plan.scale != TQ_SCALE_EDEN && plan.scale != TQ_SCALE_NORM) return false;
    for (const tq_side *side : {&plan.key, &plan.value})
        for (int group = 0; side->tile_bytes && group < plan.groups; group++)
            if (side->bits[group] < 1 || side->bits[group] > 4) return false;
    return true;
}

/** Chooses the kernel that packs tokens. csrc/cuda/README.md, "Appending", has the conditions as a table. */
Kernel choose_kernel(const tq_plan &plan, const tq_append_params &p)
{
    if (!tq_is_plain(&plan)) return Kernel::BASELINE;
    if (p.tokens == 1 && plan.rotation != TQ_ROTATION_DENSE) return Kernel::ONE_TOKEN;
    const bool tiles = p.tokens > FEW_TOKENS && rows_suit_tiles(p) && plan_suits_tiles(plan) && tq_is_settled(&plan);
    return tiles ? Kernel::PREFILL : Kernel::GENERAL;
}

} // namespace
} // namespace tq

using namespace tq;

tq_status tq_cuda_append(const tq_plan *plan, const tq_append_params *params, int64_t *flag, void *stream_pointer,
                         tq_error *error)
{
    TQ_CUDA_TRY(tq_check_append(plan, params, error));
    const tq_append_params &p = *params;
    TQ_CUDA_TRY(check_limits(*plan, p, error));
    if (!has_tokens(p)) return TQ_OK;
    AppendArgs args;
    TQ_CUDA_TRY(make_args(*plan, p, flag, &args, error));
    const cudaStream_t stream = (cudaStream_t)stream_pointer;
    const bool few = p.tokens <= FEW_TOKENS,
               settled = tq_is_settled(plan); // few: the same launch copies what stays exact
    const Kernel kernel = choose_kernel(*plan, p);
    switch (kernel) {
    case Kernel::BASELINE: TQ_CUDA_TRY(launch_append_baseline(args, *plan, p, few, stream, error)); break;
    case Kernel::ONE_TOKEN: return launch_append_one_token(args, settled, stream, error);
    case Kernel::GENERAL: TQ_CUDA_TRY(launch_append_general(args, settled, few, stream, error)); break;
    case Kernel::PREFILL: TQ_CUDA_TRY(launch_append_prefill(args, stream, error)); break;
    }
    return few ? TQ_OK : launch_copy_exact(args, stream, error);
}

tq_status tq_cuda_append_kernel(const tq_plan *plan, const tq_append_params *params, char *name, tq_error *error)
{
    TQ_CUDA_TRY(tq_check_append_sizes(plan, params, error));
    TQ_CUDA_TRY(check_limits(*plan, *params, error));
    if (!name) return fail(error, TQ_E_VALUE, "name", -1, 0, "a pointer, not NULL");
    snprintf(name, TQ_CUDA_KERNEL_NAME_BYTES, "%s",
             has_tokens(*params) ? NAMES[(int)choose_kernel(*plan, *params)] : "");
    return TQ_OK;
}
