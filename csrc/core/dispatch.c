/* Chooses the table of kernels: the best that this CPU supports, or the level that TURBOQUANT_ISA or tq_set_isa names.
 * A missing level is an error, never replaced silently. CONTRIBUTING.md, "Adding an ISA", says what one takes. */
#define _DEFAULT_SOURCE /* syscall */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if defined(TQ_HAVE_AVX2)
#include <cpuid.h>
#elif defined(TQ_HAVE_NEON_DOT)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(TQ_HAVE_AVX512_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include "index_internal.h"

#if defined(__AVX__)
#error "the core is for every CPU of the architecture: compile it without AVX; only csrc/kernels/<isa>.c gets ISA flags"
#endif

typedef struct {
    const tq_kernels *kernels;
    const tq_scan_kernels *scan; /* of the vector index */
    int (*ask)(void);            /* whether this CPU has it */
} level;

static int always(void) { return 1; }

#if defined(TQ_HAVE_AVX2)
/* Older compilers lack the names "f16c" and "avxvnni": CPUID leaf 1, ECX bit 29, and leaf 7, subleaf 1, EAX bit 4.
 * "avx2" has checked the operating system's support for both. */
static int has_avx2(void)
{
    unsigned a, b, c = 0, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           c >> 29 & 1;
}
#endif

#if defined(TQ_HAVE_AVX2_VNNI)
static int has_avx2_vnni(void)
{
    unsigned a = 0, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1 && has_avx2();
}
#endif

#if defined(TQ_HAVE_AVX512)
static int has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_avx2();
}
#endif

#if defined(TQ_HAVE_AVX512_VNNI)
static int has_avx512_vnni(void)
{
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") && has_avx512();
}
#endif

#if defined(TQ_HAVE_AVX512_AMX)
/* Tiles and their byte products: CPUID leaf 7, EDX bits 24 and 25. A process must ask Linux for their registers once,
 * because they make signal frames larger; Linux refuses if an alternate signal stack is too small for them. */
static int has_avx512_amx(void)
{
    unsigned a, b, c, d = 0;
    if (!has_avx512_vnni() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return 0;
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}
#endif

#if defined(TQ_HAVE_NEON_DOT)
static int has_neon_dot(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#endif

static const level levels[] = {
/* best first */
#if defined(TQ_HAVE_AVX512_AMX)
    {&tq_kernels_avx512_amx, &tq_scan_avx512_vnni, has_avx512_amx},
#endif
#if defined(TQ_HAVE_AVX512_VNNI)
    {&tq_kernels_avx512_vnni, &tq_scan_avx512_vnni, has_avx512_vnni},
#endif
#if defined(TQ_HAVE_AVX512)
    {&tq_kernels_avx512, &tq_scan_avx512, has_avx512},
#endif
#if defined(TQ_HAVE_AVX2_VNNI)
    {&tq_kernels_avx2_vnni, &tq_scan_avx2, has_avx2_vnni},
#endif
#if defined(TQ_HAVE_AVX2)
    {&tq_kernels_avx2, &tq_scan_avx2, has_avx2},
#endif
#if defined(TQ_HAVE_NEON_DOT)
    {&tq_kernels_neon_dot, &tq_scan_neon, has_neon_dot},
#endif
#if defined(TQ_HAVE_NEON)
    {&tq_kernels_neon, &tq_scan_neon, always},
#endif
    {&tq_kernels_scalar, &tq_scan_scalar, always},
};

#define N_LEVELS (sizeof levels / sizeof *levels)

static const tq_kernels *forced; /* by tq_set_isa */

/* Found once: CPUID takes microseconds in a virtual machine, and another thread may write to the environment later. */
static struct {
    int has[N_LEVELS];
    const tq_kernels *best, *chosen; /* chosen: by TURBOQUANT_ISA, else the best; NULL: it names none that is here */
    char names[8 + 16 * N_LEVELS];   /* "one of: " and the levels that are here */
} machine;

#define ONE_OF "one of: "

static const tq_kernels *level_named(const char *name)
{
    for (size_t i = 0; i < N_LEVELS; i++)
        if (machine.has[i] && strcmp(levels[i].kernels->isa, name) == 0) return levels[i].kernels;
    return NULL;
}

static void look_at_machine(void)
{
    for (size_t i = N_LEVELS; i-- > 0;)
        if ((machine.has[i] = levels[i].ask())) machine.best = levels[i].kernels;
    strcpy(machine.names, ONE_OF);
    for (size_t i = 0, n = 0; i < N_LEVELS; i++) {
        if (!machine.has[i]) continue;
        if (n++) strcat(machine.names, " ");
        strcat(machine.names, levels[i].kernels->isa);
    }
    const char *name = getenv("TURBOQUANT_ISA");
    machine.chosen = name && *name ? level_named(name) : machine.best;
}

static void know_machine(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, look_at_machine);
}

static const tq_kernels *chosen_kernels(void)
{
    if (forced) return forced;
    know_machine();
    return machine.chosen;
}

const tq_kernels *tq_get_kernels(tq_error *error)
{
    const tq_kernels *kernels = chosen_kernels();
    if (!kernels) tq_fail(error, TQ_E_UNSUPPORTED, "TURBOQUANT_ISA", -1, 0, machine.names);
    if (tq_num_threads()) return kernels;
    tq_fail(error, TQ_E_UNSUPPORTED, "TURBOQUANT_NUM_THREADS", -1, 0, "an integer in 1..256");
    return NULL;
}

const tq_scan_kernels *tq_get_scan_kernels(tq_error *error)
{
    const tq_kernels *kernels = tq_get_kernels(error);
    for (size_t i = 0; kernels && i < N_LEVELS; i++)
        if (levels[i].kernels == kernels) return levels[i].scan;
    return NULL;
}

const char *tq_isa_available(void)
{
    know_machine();
    return machine.names + strlen(ONE_OF);
}

const char *tq_isa(void)
{
    const tq_kernels *kernels = chosen_kernels();
    return kernels ? kernels->isa : "none";
}

tq_status tq_set_isa(const char *name, tq_error *error)
{
    know_machine();
    const tq_kernels *kernels = name ? level_named(name) : NULL;
    if (name && !kernels) return tq_fail(error, TQ_E_UNSUPPORTED, "isa", -1, 0, machine.names);
    forced = kernels;
    return TQ_OK;
}

const char *tq_kernel_name(const char *operation, const tq_plan *plan)
{
    const tq_kernels *kernels = chosen_kernels();
    if (!kernels || !operation || !plan) return NULL;
    /* Operations in the order of kernels->names, and what runs for a plan that is not plain; NULL: the same kernel. */
    static const char *const names[][2] = {{"rotate", NULL},
                                           {"append", "append_baseline"},
                                           {"attend", "attend_baseline"},
                                           {"dequantize", "dequantize_baseline"},
                                           {"dot", "dot_baseline"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(operation, names[i][0]) == 0)
            return names[i][1] && !tq_is_plain(plan) ? names[i][1] : kernels->names[i];
    return NULL;
}
