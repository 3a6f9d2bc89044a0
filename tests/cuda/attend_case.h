/* A case of attend_harness, and the cases that several groups of attend_cases.h have. */
#ifndef TQ_TESTS_ATTEND_CASE_H
#define TQ_TESTS_ATTEND_CASE_H
#include <functional>
#include <string>
#include <vector>

#include "turboquant_cuda.h"

/** A case, with the values of a field where it does not say otherwise. */
struct Case {
    std::string name;
    std::string key_bits = "4",
                value_bits = ""; /* one digit per group, the last one repeated; value_bits empty: as keys */
    bool fine = false;           /* groups of 16 channels */
    int head_dim = 128, page_tokens = 128, heads = 2, group = 4, tokens = 1, dtype = TQ_BF16,
        rotation = TQ_ROTATION_HADAMARD, codebook = 0;
    std::vector<int> lengths = {300}, starts = {};
    int sinks = 0, window = 0, sliding = 0, causal = 1;
    bool fresh = false, centres = false, steps = false;
    bool absent = false;      /* the block table names some pages outside the cache: is_absent */
    bool no_pages = false;    /* n_pages is 0 */
    bool shifted = false;     /* dense arrays start four numbers behind where cudaMalloc puts them */
    bool no_lse = false;      /* nobody asks for the log-sum-exp */
    bool same_values = false; /* all have the largest level and a scale of 1 */
    float softcap = 0, query_size = 3, scale_sign = 1;
    int even = 1;                 /* 1: the schedule is for equal lengths, though they may differ; 0: for any */
    int pairs = 0, metric = 0;    /* pairs of the wave; 1 + the metric's rank */
    float wave_size = 5;          /* norm of the wave's amplitudes */
    bool variance = false;        /* the variance term */
    bool neighbours = false;      /* pairs are channels 2 i and 2 i + 1, not i and i + head_dim / 2 */
    int released = 0;             /* earlier positions are stored nowhere */
    int spare_pages = 0;          /* extra columns of the block table, as if the cache could grow */
    std::vector<int> counts = {}; /* of a ragged batch: query tokens of each sequence, `tokens` at most */
    bool by_index = false;        /* sinks and window are in rows, of which some are absent */
    int slots = 0;                /* of a row of tails */
    std::vector<int> ends = {}, offsets = {};
    bool strided = false; /* out and lse have strides of their own */
    int every = 1; /* every n-th query token and the last are compared; of the others, that all numbers are finite */
    std::function<double(int, int)> boost; /* (position, length) -> factor on the key */
    std::function<double(int, int)> value_boost;
};

/** Adds cases with pages outside the cache, by add(name, change of a case). */
template <class Change, class Add> static void each_absent(const std::string &tag, Change change, Add add)
{
    for (int even : {0, 1})
        for (bool exact : {false, true})
            add("absent pages, " + tag + (even ? "" : ", uneven") + (exact ? ", exact tokens" : ""), [=](Case &c) {
                change(c);
                c.absent = true, c.even = even, c.lengths = {1000, 300, 5, 129, 0};
                if (exact) c.sinks = 4, c.window = 40, c.softcap = 20, c.centres = true;
            });
    add("absent pages, " + tag + ", long", [=](Case &c) {
        change(c);
        c.absent = true, c.lengths = {9000}, c.heads = 1, c.spare_pages = 300;
    });
    add("no pages, " + tag, [=](Case &c) {
        change(c);
        c.absent = c.no_pages = true, c.lengths = {300, 40}, c.sinks = 4, c.window = 40;
    });
    add("no pages at all, " + tag, [=](Case &c) {
        change(c);
        c.absent = c.no_pages = true, c.lengths = {300, 40};
    });
}

/** Adds cases of sequences that differ in length, whose segments have as many blocks as they need. */
template <class Add> static void add_shares(Add add)
{
    for (const char *bits : {"2", "3", "4", "43", "5310"})
        for (int group : {3, 8}) {
            const std::string tag = ", bits " + std::string(bits) + ", group " + std::to_string(group);
            auto sizes = [=](Case &c, std::vector<int> lengths) {
                c.key_bits = bits[1] && !bits[2] ? "4" : bits, c.value_bits = bits[1] && !bits[2] ? "3" : "";
                c.group = group, c.even = 0, c.spare_pages = 300, c.lengths = lengths;
            };
            add("shares" + tag, [=](Case &c) { sizes(c, {3000, 0, 1, 300, 129, 6100, 64, 4000}); });
            add("shares, everything" + tag, [=](Case &c) {
                sizes(c, {3000, 2, 700, 300, 129, 6100, 64, 4000});
                c.sinks = 4, c.window = 40, c.centres = c.steps = true, c.starts = {2500, 0, 700, 10, 0, 17, 63, 1};
                c.dtype = TQ_F16, c.softcap = group == 8 ? 30 : 0, c.sliding = group == 8 ? 3500 : 0;
            });
            add("shares, a long one" + tag, [=](Case &c) {
                sizes(c, {1, 100000, 0, 200});
                c.heads = 1, c.dtype = TQ_F32;
            });
            add("shares of 600" + tag, [=](Case &c) {
                std::vector<int> lengths;
                for (int i = 0; i < 600; i++) lengths.push_back(i * 37 % 200);
                sizes(c, lengths);
                c.heads = 1, c.group = group / 2;
            });
        }
}

/** Adds cases with many more query tokens than fit a call of decoding. */
template <class Add> static void add_many_queries(Add add)
{
    for (int tokens : {2048, 8192})
        for (const char *bits : {"2", "3", "4", "5310"})
            add(std::to_string(tokens) + " queries, bits " + bits, [=](Case &c) {
                c.tokens = tokens, c.key_bits = bits, c.lengths = {9000}, c.heads = 1, c.dtype = TQ_F16, c.every = 61;
                c.fresh = true, c.sinks = 4, c.window = 40;
            });
}

#endif
