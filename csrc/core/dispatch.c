/* Which table runs: the best this CPU supports, or the level that TURBOQUANT_ISA or tq_set_isa names. A level that is not there
 * is an error, never a silent second choice. Adding one: csrc/kernels/<isa>.c, a row here, a row in setup.py. */
#include <stdlib.h>
#include <string.h>
#include "internal.h"

#if defined(__AVX__)
#error "the core is for every CPU of the architecture: compile it without AVX; only csrc/kernels/<isa>.c gets ISA flags"
#endif

typedef struct {
    const tq_kernels *kernels;
    int (*supported)(void);
    const char *list; /* what tq_isa_available says if this is the best */
} level;

static int always(void)
{
    return 1;
}

#if defined(__x86_64__) && defined(TQ_HAVE_AVX2)
static int has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

static const level levels[] = { /* best first */
#if defined(__x86_64__) && defined(TQ_HAVE_AVX2)
    {&tq_kernels_avx2, has_avx2, "avx2 scalar"},
#endif
    {&tq_kernels_scalar, always, "scalar"},
};

#define N_LEVELS (sizeof levels / sizeof *levels)

static const tq_kernels *forced; /* by tq_set_isa */

static const level *best_level(void)
{
    for (size_t i = 0; i < N_LEVELS; i++)
        if (levels[i].supported()) return &levels[i];
    return &levels[N_LEVELS - 1];
}

static const tq_kernels *find(const char *name, const char *argument, tq_error *error)
{
    for (size_t i = 0; i < N_LEVELS; i++)
        if (levels[i].supported() && strcmp(levels[i].kernels->isa, name) == 0) return levels[i].kernels;
    tq_fail(error, TQ_E_UNSUPPORTED, argument, -1, 0, tq_isa_available());
    return NULL;
}

const tq_kernels *tq_get_kernels(tq_error *error)
{
    if (forced) return forced;
    const char *name = getenv("TURBOQUANT_ISA");
    if (name && *name) return find(name, "TURBOQUANT_ISA", error);
    return best_level()->kernels;
}

const char *tq_isa_available(void)
{
    return best_level()->list;
}

const char *tq_isa(void)
{
    const tq_kernels *kernels = tq_get_kernels(NULL);
    return kernels ? kernels->isa : "none";
}

tq_status tq_set_isa(const char *name, tq_error *error)
{
    const tq_kernels *kernels = NULL;
    if (name && !(kernels = find(name, "isa", error))) return TQ_E_UNSUPPORTED;
    forced = kernels;
    return TQ_OK;
}

const char *tq_kernel_name(const char *operation, const tq_plan *plan)
{
    const tq_kernels *kernels = tq_get_kernels(NULL);
    if (!kernels || !operation || !plan) return NULL;
    const char *names[][2] = {{"rotate", kernels->names.rotate}, {"append", kernels->names.append}, {"attend", kernels->names.attend},
                              {"dequantize", kernels->names.dequantize}, {"dot", kernels->names.dot}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(operation, names[i][0]) == 0) return names[i][1];
    return NULL;
}
