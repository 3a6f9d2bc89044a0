/* The cases of attend_harness. */
#ifndef TQ_TESTS_ATTEND_CASES_H
#define TQ_TESTS_ATTEND_CASES_H
#include <math.h>
#include <string.h>

#include <string>
#include <vector>

#include "attend_case.h"
#include "turboquant_cuda.h"

/** Adds cases with a wave and a metric of keys: every strategy, every kind of call. */
static void add_moments(std::vector<Case> *cases)
{
    auto add = [&](std::string name, auto change) {
        Case c;
        c.pairs = 64, c.metric = 5, c.query_size = 1, c.wave_size = 20;
        change(c);
        if (c.pairs > (c.head_dim / 2 + 7) / 8 * 8) c.pairs = (c.head_dim / 2 + 7) / 8 * 8;
        c.name = "moments: " + name;
        cases->push_back(c);
    };
    auto add_absent = [&](std::string tag, auto change) { each_absent(tag, change, add); };
    for (const char *bits : {"2", "3", "4", "5310", "8"})
        for (int d : {128, 64, 80, 96, 256, 40})
            for (int group : {1, 4, 7, 12, 33}) {
                std::string tag =
                    "bits " + std::string(bits) + ", dim " + std::to_string(d) + ", group " + std::to_string(group);
                auto sizes = [=](Case &c) {
                    c.key_bits = bits, c.head_dim = d, c.group = group, c.neighbours = group == 4;
                    c.lengths = {300, 1000, 0, 129};
                };
                add(tag, sizes);
                add(tag + ", everything", [=](Case &c) {
                    sizes(c);
                    c.even = 0, c.sinks = 4, c.window = 40, c.centres = c.steps = true, c.starts = {17, 300, 0, 5};
                    c.softcap = group == 7 ? 50 : 0, c.sliding = 600, c.dtype = group == 12 ? TQ_F16 : TQ_BF16;
                    c.scale_sign = group == 1 ? -1 : 1, c.spare_pages = group == 4 ? 150 : 0;
                });
            }
    add_shares(add);
    add_many_queries(add);
    /* bits of keys, of values; 63 and 44 run other kernels, as does group 7 with 64 channels */
    for (const char *bits : {"43", "32", "12", "55", "25", "14", "63", "44"})
        for (int d : {128, 64})
            for (int group : {4, 7})
                for (int spare : {0, 600}) /* with 128 channels: half pages, or pages of two units */
                    add("sides " + std::string(bits) + ", dim " + std::to_string(d) + ", group " +
                            std::to_string(group) + (spare ? ", room for more pages" : ""),
                        [=](Case &c) {
                            c.key_bits = bits[0], c.value_bits = bits[1], c.head_dim = d, c.group = group;
                            c.lengths = {300, 1000, 0, 129}, c.spare_pages = spare, c.sinks = 4;
                            c.window = spare ? 40 : 0, c.softcap = group == 7 ? 50 : 0;
                        });
    for (int pairs : {0, 8, 24, 64})
        for (int metric : {0, 1, 3, 5})
            add(std::to_string(pairs) + " pairs, metric " + std::to_string(metric), [=](Case &c) {
                c.pairs = pairs, c.metric = metric, c.dtype = TQ_F32, c.key_bits = "3", c.lengths = {700, 40};
            });
    for (const char *bits : {"2", "3", "4", "5310"})
        for (int group : {4, 7, 12, 32})
            for (bool even : {true, false})
                add("amplitudes of 1000, bits " + std::string(bits) + ", group " + std::to_string(group) +
                        (even ? "" : ", three kernels"),
                    [=](Case &c) {
                        c.wave_size = 1000, c.key_bits = bits, c.group = group, c.even = even, c.heads = 3;
                        c.lengths = {1000, 400, 2000};
                    });
    for (int d : {64, 128, 256})
        for (int group : {4, 12}) {
            add("far away, dim " + std::to_string(d) + ", group " + std::to_string(group), [=](Case &c) {
                c.head_dim = d, c.group = group, c.heads = 1, c.wave_size = 1000, c.lengths = {(1 << 20) + 1};
                c.released = (1 << 20) - 1024, c.sliding = 700;
            });
            add("far away, window, several queries, dim " + std::to_string(d) + ", group " + std::to_string(group),
                [=](Case &c) {
                    c.head_dim = d, c.group = group, c.heads = 1, c.wave_size = 1000, c.lengths = {(1 << 20) + 70};
                    c.released = (1 << 20) - 1024, c.sliding = 700, c.sinks = 4, c.window = 64, c.tokens = 5;
                    c.fresh = true, c.dtype = TQ_F32;
                });
        }
    for (int tokens : {2, 5, 33})
        for (const char *bits : {"2", "3", "4", "53"})
            for (bool even : {true, false})
                add(std::to_string(tokens) + " queries, bits " + bits + (even ? "" : ", three kernels"), [=](Case &c) {
                    c.tokens = tokens, c.key_bits = bits, c.lengths = {500, 190, 20}, c.heads = 2, c.even = even;
                    c.fresh = true, c.sinks = 3, c.window = 40;
                });
    for (int batch : {3, 26, 50, 200, 600}) /* blocks that share a multiprocessor */
        for (int d : {64, 128})
            add(std::to_string(batch) + " sequences, dim " + std::to_string(d), [=](Case &c) {
                for (int i = 0; i < batch; i++) c.lengths.resize(i + 1, i * 37 % 400 + (batch < 20 ? 600 : 0));
                c.heads = 1, c.head_dim = d, c.key_bits = batch % 4 ? "3" : "2";
            });
    for (const char *bits : {"2", "3", "4"}) { /* whole and last blocks of a schedule */
        for (int pairs : {0, 64})
            add(std::string("a few long sequences, bits ") + bits + (pairs ? ", wave" : ""), [=](Case &c) {
                c.lengths = {20000, 300, 5000, 0, 129, 300, 1, 2500}, c.heads = 3, c.group = 1, c.even = 0;
                c.key_bits = bits, c.pairs = pairs, c.metric = pairs ? 5 : 0, c.sinks = 4, c.window = 40;
            });
        for (int length : {0, 600}) /* more segments than blocks that run at once: whole blocks of either size */
            add(std::string("600 sequences and a long one, bits ") + bits + (length ? ", equal" : ""), [=](Case &c) {
                for (int i = 0; i < 600; i++) c.lengths.resize(i + 1, length ? length : i * 37 % 400);
                c.lengths[77] = 20000, c.heads = 1, c.group = 1, c.even = 0, c.key_bits = bits;
            });
    }
    for (const char *bits : {"2", "3", "4", "5"}) /* many segments with exact tokens */
        for (int group : {1, 8})
            for (int pairs : {0, 64})
                add("300 sequences, window 128, bits " + std::string(bits) + ", group " + std::to_string(group) +
                        (pairs ? ", wave" : ""),
                    [=](Case &c) {
                        for (int i = 0; i < 300; i++) c.lengths.resize(i + 1, i * 37 % 400);
                        c.lengths[77] = 9000, c.heads = 1, c.group = group, c.even = 0, c.sinks = 4, c.window = 128;
                        c.key_bits = bits, c.value_bits = *bits == '5' ? "4" : "", c.pairs = pairs;
                        c.metric = pairs ? 5 : 0;
                    });
    for (int heads : {1, 7}) /* clusters of 16, and parts that are merged */
        for (int length : {11000, 20000})
            add("long, heads " + std::to_string(heads) + ", " + std::to_string(length) + " tokens",
                [=](Case &c) { c.heads = heads, c.lengths = {length}, c.key_bits = "3", c.sinks = 4, c.window = 40; });
    for (int pt : {32, 64, 96})
        for (int group : {3, 7})
            add("pages of " + std::to_string(pt) + ", group " + std::to_string(group), [=](Case &c) {
                c.page_tokens = pt, c.group = group, c.lengths = {500, 31, 97}, c.spare_pages = group == 7 ? 150 : 0;
            });
    for (int rotation : {TQ_ROTATION_DENSE, TQ_ROTATION_NONE})
        for (int d : {128, 80})
            add("rotation " + std::to_string(rotation) + ", dim " + std::to_string(d), [=](Case &c) {
                c.rotation = rotation, c.head_dim = d, c.centres = true, c.dtype = TQ_F32, c.window = 16;
                c.lengths = {900, 33};
            });
    for (int d : {40, 128, 256})
        for (int group : {4, 7})
            add("fine, dim " + std::to_string(d) + ", group " + std::to_string(group), [=](Case &c) {
                c.fine = true, c.key_bits = "8532100000000014", c.head_dim = d, c.group = group;
                c.lengths = {1100, 0, 129}, c.spare_pages = group == 7 ? 150 : 0, c.sinks = 4, c.window = 128;
            });
    add("not causal", [](Case &c) { c.causal = 0, c.tokens = 30, c.group = 1, c.sinks = 4, c.lengths = {131, 400}; });
    for (const char *bits : {"2", "3", "4", "43", "5310"})
        for (int group : {4, 7, 12, 33})
            add_absent("bits " + std::string(bits) + ", group " + std::to_string(group),
                       [=](Case &c) { c.key_bits = bits, c.group = group; });
    add("one query of zeros", [](Case &c) { c.query_size = 0, c.wave_size = 1000, c.lengths = {500}; });
}

/** Adds ragged batches and exact tokens by index, for every strategy. */
static void add_ragged(std::vector<Case> *cases)
{
    auto add = [&](std::string name, auto change) {
        Case c;
        change(c);
        c.name = "ragged: " + name;
        cases->push_back(c);
    };
    const std::vector<int> lengths = {700, 0, 129, 300, 2, 1500, 64, 4}, ones = {1, 0, 1, 1, 1, 0, 1, 0},
                           chunks = {1, 5, 40, 0, 7, 1, 64, 3};
    for (const char *bits : {"2", "3", "4", "43", "5310", "8"})
        for (int d : {128, 64, 80, 256})
            for (int group : {1, 4, 12})
                for (bool moments : {false, true})
                    for (int how = 0; how < 4; how++) {
                        const bool many = how % 2, one = how / 2;
                        std::string tag = std::string(bits) + " bits, dim " + std::to_string(d) + ", group " +
                                          std::to_string(group) + (moments ? ", wave" : "") + (many ? ", chunks" : "") +
                                          (one ? ", alone" : "");
                        if (many && group == 12 && (d == 256 || *bits == '8')) continue; /* takes long */
                        add(tag, [&](Case &c) {
                            c.key_bits = bits, c.head_dim = d, c.group = group, c.heads = 2, c.strided = true;
                            c.lengths = one ? std::vector<int>{900} : lengths, c.counts = many ? chunks : ones;
                            if (one) c.counts = {many ? 9 : 1};
                            c.tokens = many ? one ? 9 : 64 : 1, c.even = group != 4, c.by_index = true, c.sinks = 4;
                            if (many) c.slots = 60, c.window = 50, c.centres = c.steps = true;
                            if (group == 4) c.spare_pages = 150, c.softcap = 30;
                            if (group == 12) c.dtype = TQ_F32;
                            if (moments) c.pairs = d / 2, c.metric = 5, c.query_size = 1, c.wave_size = 20;
                            if (moments) c.offsets.assign(c.lengths.size(), 12345), c.offsets[0] = -700;
                            if (c.lengths.size() > 1 && group == 1) c.ends = {600, 0, 129, 299, 1, 90, 0, 4};
                        });
                    }
    for (int pt : {32, 64, 96})
        for (bool causal : {true, false})
            add("pages of " + std::to_string(pt) + (causal ? "" : ", not causal"), [&](Case &c) {
                c.page_tokens = pt, c.lengths = lengths, c.counts = chunks, c.tokens = 64, c.causal = causal;
                c.by_index = true, c.sinks = 3, c.slots = c.window = 32, c.key_bits = "3", c.sliding = causal ? 200 : 0;
            });
    add("own rings", [&](Case &c) {
        c.lengths = lengths, c.counts = ones, c.sinks = 4, c.window = 40, c.ends = lengths, c.ends[0] = 690;
    });
    add("starts, dense rotation", [&](Case &c) {
        c.lengths = lengths, c.counts = chunks, c.tokens = 64, c.rotation = TQ_ROTATION_DENSE, c.dtype = TQ_F32;
        c.starts = {17, 0, 128, 3, 2, 900, 0, 0}, c.by_index = true, c.sinks = 4;
    });
    add("fine", [&](Case &c) {
        c.fine = true, c.key_bits = "8532100000000014", c.lengths = lengths, c.counts = chunks, c.tokens = 64;
        c.by_index = true, c.sinks = 4, c.slots = 64, c.window = 64;
    });
    for (int batch : {64, 300, 1000})
        for (const char *bits : {"3", "4"})
            for (int even : {0, 1})
                add(std::to_string(batch) + " sequences, " + bits + " bits" + (even ? "" : ", uneven"), [&](Case &c) {
                    for (int i = 0; i < batch; i++) {
                        c.lengths.resize(i + 1, i * 37 % 400);
                        c.counts.resize(i + 1, i % 5 != 3 && i < batch * 3 / 4);
                    }
                    c.heads = 1, c.key_bits = bits, c.even = even, c.by_index = true, c.sinks = 4, c.pairs = 64;
                    c.metric = 5, c.query_size = 1, c.wave_size = 20, c.strided = true;
                });
}

/** Adds heads of more than 256 channels, which have kernels of their own on pages, prepare and combine. */
static void add_wide_heads(std::vector<Case> *cases)
{
    auto add = [&](std::string name, auto change) {
        Case c;
        c.lengths = {300, 1000, 0, 129};
        change(c);
        c.name = "wide: " + name;
        cases->push_back(c);
    };
    for (const char *bits : {"1", "2", "3", "4", "5", "8", "5310"})
        for (int d : {264, 320, 512})
            for (bool wave : {false, true}) {
                const int group = d == 264 ? 1 : d == 320 ? 5 : 8;
                std::string tag = "bits " + std::string(bits) + ", dim " + std::to_string(d) + (wave ? ", wave" : "");
                auto sizes = [=](Case &c) {
                    c.key_bits = bits, c.head_dim = d, c.group = group, c.neighbours = d == 320;
                    if (wave) c.pairs = d / 16 * 8, c.metric = 5, c.query_size = 1, c.wave_size = 20;
                };
                add(tag, sizes);
                add(tag + ", everything", [=](Case &c) {
                    sizes(c);
                    c.sinks = 4, c.window = 40, c.centres = c.steps = true, c.starts = {17, 300, 0, 5}, c.sliding = 600;
                    c.softcap = d == 512 ? 50 : 0, c.dtype = d == 320 ? TQ_F16 : d == 264 ? TQ_F32 : TQ_BF16;
                    c.scale_sign = d == 264 ? -1 : 1, c.spare_pages = d == 320 ? 150 : 0, c.even = 0;
                });
            }
    for (int d : {288, 384, 456, 480, 504})
        add("dim " + std::to_string(d),
            [=](Case &c) { c.head_dim = d, c.key_bits = "3", c.value_bits = "5421", c.dtype = TQ_F32; });
    for (int d : {320, 512}) {
        std::string tag = ", dim " + std::to_string(d);
        for (int rotation : {TQ_ROTATION_DENSE, TQ_ROTATION_NONE})
            add("rotation " + std::to_string(rotation) + tag, [=](Case &c) {
                c.rotation = rotation, c.head_dim = d, c.centres = c.steps = true, c.dtype = TQ_F32, c.window = 16;
                c.pairs = 64, c.metric = 3, c.query_size = 1, c.lengths = {600, 33};
            });
        for (int pt : {32, 64, 96})
            add("pages of " + std::to_string(pt) + tag, [=](Case &c) { c.page_tokens = pt, c.head_dim = d; });
        for (int tokens : {2, 5, 40})
            add(std::to_string(tokens) + " queries" + tag, [=](Case &c) {
                c.tokens = tokens, c.head_dim = d, c.lengths = {500, 190, 20}, c.causal = c.fresh = tokens != 5;
                c.sinks = 3, c.window = 40, c.pairs = tokens == 2 ? 0 : 64, c.query_size = 1;
            });
        /* 20 and 28 rows: blocks of prepare have four rows, though there are many rows or a matrix */
        for (int tokens : {5, 7}) {
            add(std::to_string(tokens) + " queries of 16 sequences" + tag, [=](Case &c) {
                c.tokens = tokens, c.head_dim = d, c.heads = 8, c.lengths.assign(16, 200), c.lengths[3] = 700;
                c.sinks = tokens == 5 ? 0 : 3, c.window = tokens == 5 ? 0 : 16;
            });
            add(std::to_string(tokens) + " queries, a dense rotation" + tag, [=](Case &c) {
                c.tokens = tokens, c.head_dim = d, c.rotation = TQ_ROTATION_DENSE, c.lengths = {600, 33};
            });
        }
        add("long" + tag, [=](Case &c) { c.head_dim = d, c.heads = 1, c.group = 8, c.lengths = {20000}; });
        add("all values the largest" + tag, [=](Case &c) {
            c.same_values = true, c.query_size = 0, c.head_dim = d, c.key_bits = "8", c.lengths = {3000};
        });
        add("logits of +-1e4" + tag, [=](Case &c) { c.query_size = 3000, c.head_dim = d, c.key_bits = "8"; });
        add("far away" + tag, [=](Case &c) {
            c.head_dim = d, c.heads = 1, c.pairs = d / 16 * 8, c.query_size = 1, c.wave_size = 1000;
            c.lengths = {(1 << 20) + 1}, c.released = (1 << 20) - 1024, c.sliding = 700;
        });
        for (bool chunks : {false, true})
            add("ragged" + std::string(chunks ? ", chunks" : "") + tag, [=](Case &c) {
                c.head_dim = d, c.strided = true, c.lengths = {700, 0, 129, 300, 2, 64, 4}, c.by_index = true;
                c.counts = chunks ? std::vector<int>{1, 5, 40, 0, 2, 64, 3} : std::vector<int>{1, 0, 1, 1, 1, 1, 0};
                c.tokens = chunks ? 64 : 1, c.sinks = 4, c.slots = chunks ? 60 : 0, c.window = chunks ? 50 : 0;
                c.pairs = 64, c.metric = 5, c.query_size = 1, c.offsets.assign(7, 12345);
            });
        each_absent("heads" + tag, [=](Case &c) { c.head_dim = d, c.key_bits = "3"; }, add);
    }
}

/** Adds plans with a variance term, which takes keys of one width: every strategy, with and without moments. */
static void add_variance(std::vector<Case> *cases)
{
    for (bool moments : {false, true}) {
        auto add = [&](std::string name, auto change) {
            Case c;
            if (moments) c.pairs = 64, c.metric = 5, c.query_size = 1, c.wave_size = 20;
            change(c);
            if (c.key_bits.size() > 1) c.value_bits = c.key_bits, c.key_bits.resize(1);
            if (c.pairs > (c.head_dim / 2 + 7) / 8 * 8) c.pairs = (c.head_dim / 2 + 7) / 8 * 8;
            c.variance = true,
            c.name = std::string("variance term, ") + (moments ? "moments: " : "no moments: ") + name;
            cases->push_back(c);
        };
        for (const char *bits : {"2", "3", "4", "43", "8"})
            for (int d : {128, 64, 80, 256})
                for (int group : {1, 4, 7, 12, 33}) {
                    std::string tag =
                        "bits " + std::string(bits) + ", dim " + std::to_string(d) + ", group " + std::to_string(group);
                    auto sizes = [=](Case &c) {
                        c.key_bits = bits, c.head_dim = d, c.group = group, c.lengths = {300, 1000, 0, 129};
                    };
                    add(tag, [=](Case &c) {
                        sizes(c);
                        c.spare_pages = group == 7 ? 150 : 0;
                        c.boost = [](int i, int) { return 0.5 + i / 500.0; }; /* scales that differ */
                    });
                    add(tag + ", everything", [=](Case &c) {
                        sizes(c);
                        c.even = 0, c.sinks = 4, c.window = 40, c.centres = c.steps = true, c.starts = {17, 300, 0, 5};
                        c.softcap = group == 7 ? 5 : 0, c.sliding = 600, c.dtype = group == 12 ? TQ_F16 : TQ_BF16;
                        c.scale_sign = group == 1 ? -1 : 1, c.spare_pages = group == 4 ? 150 : 0;
                    });
                }
        add_shares(add);
        for (const char *bits : {"1", "5", "6"})
            for (int group : {4, 12, 33})
                add("bits " + std::string(bits) + ", group " + std::to_string(group),
                    [=](Case &c) { c.key_bits = bits, c.group = group, c.lengths = {300, 1000}; });
        for (const char *bits : {"2", "3", "4", "54"})
            for (int group : {4, 16})
                add("softcap, bits " + std::string(bits) + ", group " + std::to_string(group), [=](Case &c) {
                    c.key_bits = bits, c.group = group, c.softcap = 2, c.sinks = 4, c.window = 16,
                    c.lengths = {700, 40};
                });
        for (int tokens : {2, 5, 33, 200})
            for (const char *bits : {"2", "3", "4", "53"})
                add(std::to_string(tokens) + " queries, bits " + bits, [=](Case &c) {
                    c.tokens = tokens, c.key_bits = bits, c.lengths = {500, 290}, c.heads = 2, c.even = tokens != 5;
                    c.fresh = true, c.sinks = 3, c.window = 40;
                });
        for (int heads : {1, 7}) /* clusters of 16, and parts that are merged */
            for (const char *bits : {"2", "4"})
                add("long, heads " + std::to_string(heads) + ", bits " + bits, [=](Case &c) {
                    c.heads = heads, c.lengths = {11000}, c.key_bits = bits, c.sinks = 4, c.window = 40;
                });
        for (int pt : {32, 64, 96})
            add("pages of " + std::to_string(pt), [=](Case &c) { c.page_tokens = pt, c.lengths = {500, 31, 97}; });
        for (int rotation : {TQ_ROTATION_DENSE, TQ_ROTATION_NONE})
            add("rotation " + std::to_string(rotation), [=](Case &c) {
                c.rotation = rotation, c.centres = true, c.dtype = TQ_F32, c.window = 16, c.lengths = {900, 33};
            });
        for (int group : {4, 7})
            add("fine, group " + std::to_string(group), [=](Case &c) {
                c.fine = true, c.key_bits = "3", c.value_bits = "85321", c.group = group, c.lengths = {1100, 0, 129};
                c.sinks = 4, c.window = 128;
            });
        for (int d : {320, 512})
            add("dim " + std::to_string(d), [=](Case &c) { c.head_dim = d, c.key_bits = "3", c.lengths = {600, 33}; });
        for (const char *bits : {"2", "4"})
            for (int group : {4, 12, 33})
                each_absent(
                    "bits " + std::string(bits) + ", group " + std::to_string(group),
                    [=](Case &c) { c.key_bits = bits, c.group = group; }, add);
        for (bool chunks : {false, true})
            for (int group : {4, 12})
                add("ragged" + std::string(chunks ? ", chunks" : "") + ", group " + std::to_string(group),
                    [=](Case &c) {
                        c.group = group, c.strided = true, c.lengths = {700, 0, 129, 300, 2, 64, 4}, c.by_index = true;
                        c.counts =
                            chunks ? std::vector<int>{1, 5, 40, 0, 2, 64, 3} : std::vector<int>{1, 0, 1, 1, 1, 1, 0};
                        c.tokens = chunks ? 64 : 1, c.sinks = 4, c.slots = chunks ? 60 : 0, c.window = chunks ? 50 : 0;
                        c.key_bits = "2", c.offsets.assign(7, 12345);
                    });
        add("queries of zeros", [](Case &c) { c.query_size = 0, c.lengths = {500}; });
        if (!moments) add("logits of +-1e4", [](Case &c) { c.query_size = 3000, c.key_bits = "8", c.lengths = {500}; });
    }
}

static std::vector<Case> all_cases()
{
    std::vector<Case> cases;
    auto add = [&](std::string name, auto change) {
        Case c;
        change(c);
        c.name = name;
        cases.push_back(c);
    };
    for (const char *bits : {"2", "3", "4", "1", "5", "6", "8"})
        for (int d : {128, 64, 80, 96, 256}) {
            std::string tag = std::string("bits ") + bits + " dim " + std::to_string(d);
            add(tag, [&](Case &c) { c.key_bits = bits, c.head_dim = d, c.lengths = {300, 1000}; });
            add(tag + " f32",
                [&](Case &c) { c.key_bits = bits, c.head_dim = d, c.dtype = TQ_F32, c.lengths = {129, 0, 777}; });
        }
    for (int d : {8, 16, 24, 32, 40, 72, 112, 136, 160, 200, 224, 248})
        add("dim " + std::to_string(d), [&](Case &c) { c.head_dim = d, c.key_bits = "3", c.dtype = TQ_F32; });
    for (int g : {1, 2, 3, 5, 7, 8, 12, 16, 17, 32, 48, 64})
        for (const char *bits : {"2", "3", "4", "5310", "8630"})
            add("group " + std::to_string(g) + " bits " + bits,
                [&](Case &c) { c.group = g, c.key_bits = bits, c.heads = 1, c.dtype = TQ_F32; });
    add("group 16 dim 256", [&](Case &c) { c.group = 16, c.head_dim = 256, c.heads = 1, c.dtype = TQ_F32; });
    add("mixed 5430/4321", [&](Case &c) { c.key_bits = "5430", c.value_bits = "4321", c.dtype = TQ_F32; });
    add("mixed 0035/1205", [&](Case &c) { c.key_bits = "0035", c.value_bits = "1205", c.dtype = TQ_F32; });
    add("mixed dim 256",
        [&](Case &c) { c.head_dim = 256, c.key_bits = "54433210", c.value_bits = "12345022", c.dtype = TQ_F32; });
    add("keys 4 values 2", [&](Case &c) { c.value_bits = "2"; });
    add("keys 3 values 4", [&](Case &c) { c.key_bits = "3", c.value_bits = "4"; });
    for (int n : {0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257})
        add("length " + std::to_string(n), [&](Case &c) { c.lengths = {n}, c.key_bits = "3"; });
    for (int pt : {32, 64, 96})
        add("page of " + std::to_string(pt),
            [&](Case &c) { c.page_tokens = pt, c.lengths = {500, 31, 97}, c.key_bits = "3"; });
    add("ragged batch", [](Case &c) { c.lengths = {0, 1, 5000, 128, 0, 129, 700, 64}, c.key_bits = "2"; });
    add("batch of 100", [](Case &c) {
        for (int i = 0; i < 100; i++) c.lengths.resize(i + 1, i * 37 % 400);
    });
    /* eight, four, two blocks or one share a segment; they have 16 to 2 warps */
    for (int batch : {1, 3, 12, 26, 50, 100, 200, 400, 600, 1300})
        for (const char *bits : {"2", "3", "4", "5310", "8630"}) {
            std::string tag = std::to_string(batch) + " sequences, bits " + bits;
            auto lengths = [=](Case &c) {
                for (int i = 0; i < batch; i++)
                    c.lengths.resize(i + 1, i * 37 % (batch < 400 ? 400 : 100) + (batch < 20 ? 600 : 0));
                c.key_bits = bits, c.heads = 1;
            };
            add(tag, lengths);
            add(tag + ", everything", [=](Case &c) {
                lengths(c);
                c.group = 7, c.sinks = 4, c.window = 48, c.centres = c.steps = true, c.dtype = TQ_F16, c.sliding = 500;
                c.head_dim = batch % 2 ? 104 : 64;
            });
        }
    add("long, group 8, window", [](Case &c) {
        c.lengths = {20000}, c.heads = 1, c.group = 8, c.sinks = 4, c.window = 100, c.centres = true, c.dtype = TQ_F32;
    });
    for (const char *bits : {"3", "5310"}) /* many blocks for one segment; merging rotates back */
        for (int d : {64, 104, 128})
            for (int rotation : {TQ_ROTATION_HADAMARD, TQ_ROTATION_NONE})
                add("long, everything, bits " + std::string(bits) + ", dim " + std::to_string(d) + ", rotation " +
                        std::to_string(rotation),
                    [=](Case &c) {
                        c.lengths = {20000}, c.heads = 1, c.group = 4, c.sinks = 4, c.window = 100;
                        c.head_dim = d, c.rotation = rotation, c.key_bits = d == 64 && bits[1] ? "53" : bits;
                        c.centres = c.steps = true, c.dtype = TQ_F32;
                    });
    for (const char *bits : {"2", "3", "4", "5310"}) /* on both sides of the choice between kernels with other units */
        for (int heads : {3, 140})
            add("uneven, bits " + std::string(bits) + ", heads " + std::to_string(heads), [=](Case &c) {
                c.key_bits = bits, c.heads = heads, c.group = 1, c.even = 0, c.spare_pages = 300, c.lengths = {260, 70};
            });
    add("two long ones of different lengths", [](Case &c) { c.lengths = {9000, 2000}, c.heads = 3, c.key_bits = "2"; });
    add("starts", [](Case &c) { c.lengths = {300, 64, 640, 64}, c.starts = {17, 63, 300, 64}; });
    add("room to grow", [](Case &c) { c.lengths = {300}, c.spare_pages = 500; });
    add("long", [](Case &c) { c.lengths = {20000}, c.heads = 1; });
    add("long 3 bits f32", [](Case &c) { c.lengths = {20000}, c.heads = 1, c.key_bits = "3", c.dtype = TQ_F32; });
    for (int dtype : {TQ_F32, TQ_F16, TQ_BF16}) {
        std::string tag = dtype == TQ_F32 ? " f32" : dtype == TQ_F16 ? " f16" : " bf16";
        add("sinks and window" + tag,
            [&](Case &c) { c.sinks = 4, c.window = 128, c.lengths = {1000, 3, 4, 100, 132, 133, 0}, c.dtype = dtype; });
        add("sinks, window, starts" + tag, [&](Case &c) {
            c.sinks = 4, c.window = 50, c.lengths = {1000, 90, 90}, c.starts = {2, 5, 88}, c.dtype = dtype;
        });
        add("window only, not causal" + tag,
            [&](Case &c) { c.window = 40, c.causal = 0, c.tokens = 3, c.lengths = {500, 20}, c.dtype = dtype; });
    }
    add("sliding window", [](Case &c) { c.sliding = 200, c.lengths = {1000, 100}, c.dtype = TQ_F32; });
    add("sliding window, sinks, window",
        [](Case &c) { c.sliding = 200, c.sinks = 4, c.window = 64, c.lengths = {1000, 100, 150}; });
    add("sliding inside window", [](Case &c) { c.sliding = 20, c.sinks = 4, c.window = 64, c.lengths = {1000, 10}; });
    add("softcap", [](Case &c) { c.softcap = 5, c.dtype = TQ_F32, c.sinks = 4, c.window = 16; });
    add("softcap, centres", [](Case &c) { c.softcap = 5, c.dtype = TQ_F32, c.centres = true; });
    add("centres", [](Case &c) { c.centres = true, c.sinks = 2, c.window = 30, c.dtype = TQ_F32; });
    add("centres and steps, mixed",
        [](Case &c) { c.centres = c.steps = true, c.key_bits = "5321", c.value_bits = "4420", c.dtype = TQ_F32; });
    for (int d : {128, 80, 64})
        add("dense rotation dim " + std::to_string(d), [&](Case &c) {
            c.rotation = TQ_ROTATION_DENSE, c.head_dim = d, c.centres = c.steps = true, c.key_bits = "4321",
            c.dtype = TQ_F32, c.window = 16, c.lengths = {900};
        });
    add("dense rotation, group 16",
        [](Case &c) { c.rotation = TQ_ROTATION_DENSE, c.group = 16, c.heads = 1, c.dtype = TQ_F32; });
    add("no rotation", [](Case &c) { c.rotation = TQ_ROTATION_NONE, c.dtype = TQ_F32; });
    add("sphere codebook", [](Case &c) { c.codebook = 1, c.dtype = TQ_F32; });
    add("negative softmax scale", [](Case &c) { c.scale_sign = -1, c.centres = true, c.dtype = TQ_F32; });
    for (int t : {2, 5, 8, 33, 128})
        for (const char *bits : {"2", "3", "4"}) {
            std::string tag = std::to_string(t) + " queries, bits " + bits;
            add(tag, [&](Case &c) {
                c.tokens = t, c.key_bits = bits, c.lengths = {500, 130, 20}, c.heads = 1, c.dtype = TQ_F32;
            });
            add(tag + ", fresh, window", [&](Case &c) {
                c.tokens = t, c.key_bits = bits, c.fresh = true, c.sinks = 3, c.window = 40, c.lengths = {500, 190, 20},
                c.heads = 1;
            });
        }
    /* tiles of rows, each with blocks of its own, whose parts are merged */
    for (const char *bits : {"2", "3", "4", "5310"})
        for (int d : {64, 128})
            for (bool exact : {false, true})
                add("tiles of rows, bits " + std::string(bits) + (exact ? ", exact tokens" : ""), [&](Case &c) {
                    c.tokens = 9, c.heads = 3, c.key_bits = bits, c.head_dim = d, c.lengths = {12000};
                    if (exact) c.sinks = 4, c.window = 300, c.fresh = true;
                });
    const std::vector<int> mixed_lengths = {6100, 0, 33, 130, 257, 6001, 700, 1, 64, 4000, 128, 127, 129, 900, 3000, 5};
    auto one_long = [](int longest, int sequences) {
        std::vector<int> lengths = {longest};
        for (int i = 1; i < sequences; i++) lengths.push_back(37 * i % 300);
        return lengths;
    };
    for (const char *bits : {"2", "3", "4", "5310"}) /* whole pages in FUSED */
        for (int rows : {3, 5, 12})
            for (int d : {64, 128})
                for (bool exact : {false, true}) {
                    if (*bits == '4' && d == 128) continue; /* FUSED has half pages alone */
                    add(std::to_string(rows) + " rows, whole pages, bits " + bits + " dim " + std::to_string(d) +
                            (exact ? ", exact tokens" : ""),
                        [&](Case &c) {
                            c.group = rows, c.heads = 4, c.key_bits = bits, c.head_dim = d;
                            c.lengths = mixed_lengths;
                            if (exact) c.sinks = 4, c.window = 40;
                        });
                }
    for (int rows : {3, 5, 12})
        for (const char *bits : {"3", "5310"})
            add(std::to_string(rows) + " rows, pages of 96 tokens, bits " + bits, [&](Case &c) {
                c.group = rows, c.heads = 4, c.key_bits = bits, c.page_tokens = 96,
                c.head_dim = *bits == '3' ? 128 : 80;
                c.lengths = mixed_lengths;
            });
    for (const char *bits : {"2", "3"})
        for (int rows : {5, 12})
            add(std::to_string(rows) + " rows, whole pages, many segments, bits " + bits, [&](Case &c) {
                c.group = rows, c.heads = 5, c.key_bits = bits, c.lengths = one_long(2040, rows == 5 ? 70 : 95);
            });
    for (const char *bits : {"2", "3", "4", "5310"}) /* few segments, which clusters of 16 share */
        for (int heads : {1, 7})
            for (int group : {1, 4, 8, 12})
                for (bool exact : {false, true})
                    add(std::to_string(heads) + " heads of " + std::to_string(group) + ", bits " + bits +
                            (exact ? ", exact tokens" : ""),
                        [&](Case &c) {
                            bool by_half = heads == 1 || (group > 4 && strlen(bits) > 1) || *bits == '4';
                            c.heads = heads, c.group = group, c.key_bits = bits;
                            c.lengths = {group > 8 ? 7000 : by_half ? 11000 : 14000}; /* longer ones fit no cluster */
                            if (exact) c.sinks = 4, c.window = 40;
                        });
    for (const char *bits : {"3", "4"}) {
        std::string tag = std::string(", bits ") + bits;
        add("6 segments of different lengths" + tag,
            [&](Case &c) { c.heads = 2, c.key_bits = bits, c.lengths = {11000, 0, 33}; });
        add("6 segments, tiles of rows" + tag, [&](Case &c) {
            c.heads = 2, c.tokens = 9, c.key_bits = bits, c.lengths = {7000}, c.sinks = 4, c.window = 300,
            c.fresh = true;
        });
        add("6 segments, sliding window" + tag,
            [&](Case &c) { c.heads = 6, c.key_bits = bits, c.sliding = 500, c.lengths = {11000}, c.starts = {10000}; });
        add("4 heads of 64 channels" + tag,
            [&](Case &c) { c.heads = 4, c.head_dim = 64, c.key_bits = bits, c.lengths = {20000}; });
    }
    for (const char *bits : {"2", "3", "4"})
        for (int group : {1, 5})
            add("1140 segments, group " + std::to_string(group) + ", bits " + bits, [&](Case &c) {
                c.group = group, c.heads = 20, c.key_bits = bits, c.head_dim = 64, c.lengths = one_long(1000, 57);
            });
    add("8 queries, window, sliding, starts", [](Case &c) {
        c.tokens = 8, c.fresh = true, c.sinks = 4, c.window = 64, c.sliding = 300, c.lengths = {1000, 90},
        c.starts = {750, 3}, c.dtype = TQ_F32;
    });
    add("6 queries dim 256", [](Case &c) { c.tokens = 6, c.head_dim = 256, c.lengths = {600}, c.heads = 1; });
    add("one dominant token",
        [](Case &c) { c.boost = [](int i, int n) { return i == n / 2 ? 40.0 : 1.0; }, c.lengths = {2000}; });
    add("all equal", [](Case &c) { c.query_size = 0, c.lengths = {2000}, c.dtype = TQ_F32; });
    /* the largest sums of products, also in whole pages */
    for (const char *bits : {"1", "2", "3", "4", "5", "6", "8", "5310", "8630"})
        for (int group : {1, 8, 12})
            add("all values the largest, group " + std::to_string(group) + ", bits " + bits, [&](Case &c) {
                c.same_values = true, c.query_size = 0, c.group = group, c.heads = 4, c.key_bits = bits;
                c.lengths = {9000};
            });
    add("logits of +-1e4", [](Case &c) { c.query_size = 3000, c.lengths = {500}; });
    /* Many rows have kernels of their own, except in float32: FUSED_MANY_ROWS and, with
     * TURBOQUANT_CUDA_PATH=hopper-line or where it costs less, MANY_ROWS. */
    for (int g : {9, 12, 16, 17, 32, 33, 64})
        for (const char *bits : {"1", "2", "3", "4", "5", "6", "8", "5310", "8630"})
            add("group " + std::to_string(g) + " bits " + bits + " bf16",
                [&](Case &c) { c.group = g, c.key_bits = bits, c.heads = 1, c.lengths = {300, 1000, 0, 128}; });
    for (int t : {3, 4, 8, 32})
        add("many rows: " + std::to_string(t) + " queries, everything", [&](Case &c) {
            c.tokens = t, c.key_bits = "5430", c.value_bits = "0214", c.fresh = c.centres = c.steps = true, c.sinks = 4,
            c.window = 64, c.sliding = 300, c.lengths = {1000, 90, 2500}, c.starts = {750, 3, 0}, c.dtype = TQ_F16;
        });
    for (int d : {8, 16, 24, 40, 64, 80, 96, 128, 200, 256})
        for (const char *bits : {"1", "2", "3", "4", "5", "8", "8532100000000014"})
            for (int dtype : {TQ_BF16, TQ_F32})
                add(std::string("fine ") + bits + " dim " + std::to_string(d), [&](Case &c) {
                    c.fine = true, c.key_bits = bits, c.head_dim = d, c.lengths = {300, 1000, 65}, c.dtype = dtype;
                });
    for (int g : {1, 3, 8, 9, 16, 33})
        add("fine, group " + std::to_string(g), [&](Case &c) {
            c.fine = true, c.group = g, c.key_bits = "85321", c.value_bits = "1480352", c.lengths = {500, 0, 128, 64},
            c.page_tokens = g % 2 ? 64 : 128, c.dtype = TQ_F32;
        });
    for (int t : {1, 4, 9})
        add("fine, everything, queries " + std::to_string(t), [&](Case &c) {
            c.fine = true, c.tokens = t, c.key_bits = "85430012", c.value_bits = "02148", c.fresh = t > 1,
            c.centres = c.steps = true, c.sinks = 4, c.window = 64, c.sliding = 300, c.lengths = {1000, 90, 2500},
            c.starts = {750, 3, 0}, c.dtype = TQ_F16, c.rotation = t == 4 ? TQ_ROTATION_DENSE : c.rotation;
        });
    add("fine, not causal, softcap", [](Case &c) {
        c.fine = true, c.key_bits = "8421", c.causal = 0, c.tokens = 5, c.softcap = 5, c.lengths = {700, 31};
    });
    auto add_wide = [&](std::string name, auto change) {
        for (const char *bits : {"2", "3", "4", "5310"})
            add("many rows: " + name + ", bits " + bits, [&](Case &c) {
                c.group = 16, c.heads = 1, c.key_bits = bits, c.lengths = {2000, 77};
                change(c);
            });
    };
    /* FUSED_MANY_ROWS: tiles of 16 and of 32 rows, parts in clusters and parts that are merged, more blocks than
     * multiprocessors */
    for (const char *bits : {"2", "3", "4", "5", "5310"})
        for (bool exact : {false, true}) {
            std::string tag = std::string(", bits ") + bits + (exact ? ", exact tokens" : "");
            auto add_few = [&](std::string name, int heads, int group, int tokens, std::vector<int> lengths) {
                add("many rows: " + name + tag, [&](Case &c) {
                    c.heads = heads, c.group = group, c.tokens = tokens, c.lengths = lengths, c.key_bits = bits;
                    c.dtype = exact ? TQ_F16 : TQ_BF16;
                    if (exact) c.sinks = 4, c.window = 40, c.fresh = tokens > 1, c.centres = true;
                });
            };
            add_few("20 in long sequences", 2, 4, 5, {20000, 9000});
            add_few("64 in a long sequence", 1, 4, 16, {30000});
            add_few("128, uneven", 1, 16, 8, {700, 0, 33, 1500});
            add_few("9 of 320 segments", 20, 9, 1, one_long(700, 16));
            add_few("24 of 160 segments", 20, 8, 3, one_long(900, 8));
            add_few("32 of 44 segments", 11, 32, 1, {4140, 2000, 1500, 1300});
            add_few("96 of 5 segments", 5, 16, 6, {*bits == '2' ? 30800 : 15300});
        }
    add_wide("one dominant token", [](Case &c) { c.boost = [](int i, int n) { return i == n / 2 ? 20.0 : 1.0; }; });
    add_wide("all equal", [](Case &c) { c.query_size = 0; });
    add_wide("logits of +-1e4", [](Case &c) { c.query_size = 3000; });
    add_wide("softcap", [](Case &c) { c.softcap = 5, c.sinks = 4, c.window = 16; });
    add_wide("dense rotation", [](Case &c) { c.rotation = TQ_ROTATION_DENSE, c.centres = c.steps = true; });
    add_wide("head_dim 104", [](Case &c) { c.head_dim = 104; });
    add_wide("negative softmax scale", [](Case &c) { c.scale_sign = -1, c.centres = true; });
    add_wide("rising logits", [](Case &c) { c.boost = [](int i, int) { return 1 + i / 100.0; }; });
    add_wide("values of all sizes", [](Case &c) { c.value_boost = [](int i, int) { return exp2(i % 29 - 14); }; });
    add_wide("some values zero", [](Case &c) { c.value_boost = [](int i, int) { return i % 3 ? 1.0 : 0.0; }; });
    add_wide("the dominant value zero", [](Case &c) {
        c.boost = [](int i, int n) { return i == n / 2 ? 20.0 : 1.0; };
        c.value_boost = [](int i, int n) { return i == n / 2 ? 0.0 : 1.0; };
    });
    add_wide("room to grow, absent pages",
             [](Case &c) { c.absent = true, c.spare_pages = 300, c.lengths = {1000, 300}; });
    for (const char *bits : {"2", "3", "4", "8", "5310"})
        for (int d : {40, 64, 128, 256})
            for (int group : {1, 4, 12, 33})
                each_absent(
                    "bits " + std::string(bits) + ", dim " + std::to_string(d) + ", group " + std::to_string(group),
                    [=](Case &c) { c.key_bits = bits, c.head_dim = d, c.group = group; }, add);
    for (int pt : {32, 64, 96})
        each_absent("pages of " + std::to_string(pt), [=](Case &c) { c.page_tokens = pt, c.key_bits = "3"; }, add);
    each_absent("fine", [](Case &c) { c.fine = true, c.key_bits = "8532100000000014"; }, add);
    each_absent("several queries", [](Case &c) { c.tokens = 5, c.fresh = true; }, add);
    /* groups of 16 in whole pages, as in every long cache on Hopper (pages: batch * heads * table columns) */
    for (int d : {40, 80, 128, 200, 256})
        for (int group : {3, 7, 17})
            for (const char *bits : {"3", "8532100000000014"})
                add("fine, whole pages, group " + std::to_string(group) + " bits " + bits + " dim " + std::to_string(d),
                    [&](Case &c) {
                        c.fine = true, c.key_bits = bits, c.head_dim = d, c.group = group, c.dtype = TQ_F16;
                        c.lengths = {1100, 0, 129, 640}, c.spare_pages = d > 128 && group == 7 ? 0 : 150;
                    });
    for (int tokens : {1, 5}) /* as calibrated plans in groups of 16 */
        for (int d : {80, 128})
            add("fine, whole pages, dense, everything, queries " + std::to_string(tokens) + ", dim " +
                    std::to_string(d),
                [&](Case &c) {
                    c.fine = true, c.key_bits = "85430012", c.value_bits = "02148", c.head_dim = d, c.tokens = tokens;
                    c.rotation = TQ_ROTATION_DENSE, c.centres = c.steps = true, c.sinks = 4, c.window = 128;
                    c.fresh = tokens > 1, c.lengths = {1500, 140, 700}, c.spare_pages = 150;
                });
    /* other head dims in whole pages, or with more than four rows; 256 as Gemma has it */
    for (int d : {80, 96, 256, 200})
        for (const char *bits : {"2", "3", "4", "53"})
            for (int group : {3, 7, 12})
                for (bool whole : {false, true})
                    add("dim " + std::to_string(d) + ", bits " + bits + ", group " + std::to_string(group) +
                            (whole ? ", whole pages" : ""),
                        [&](Case &c) {
                            c.head_dim = d, c.key_bits = bits, c.group = group, c.lengths = {1100, 0, 129, 640};
                            c.spare_pages = whole ? 150 : 0;
                            c.softcap = d == 256 ? 5 : 0, c.sliding = d == 256 ? 500 : 0;
                            c.sinks = group == 7 ? 4 : 0, c.window = group == 7 ? 40 : 0;
                        });
    for (const char *bits : {"2", "3", "4", "53"})
        for (int tokens : {3, 20})
            for (bool causal : {false, true})
                add("64 channels, " + std::to_string(4 * tokens) + " rows, bits " + bits +
                        (causal ? "" : ", not causal"),
                    [&](Case &c) {
                        c.head_dim = 64, c.key_bits = bits, c.tokens = tokens, c.causal = causal, c.dtype = TQ_F16;
                        c.lengths = {300, 131, 40}, c.sinks = 4, c.centres = c.steps = true;
                    });
    for (int d : {16, 24, 32, 64, 128}) /* whole proteins */
        for (int tokens : {30, 200})
            for (int dtype : {TQ_F32, TQ_BF16})
                add("as esm-default, dim " + std::to_string(d) + ", " + std::to_string(tokens) + " queries",
                    [&](Case &c) {
                        c.head_dim = d, c.codebook = TQ_CODEBOOK_SPHERE, c.causal = 0, c.tokens = tokens, c.group = 1;
                        c.heads = 5, c.sinks = 4, c.centres = true, c.lengths = {131, 7, 40, 200}, c.dtype = dtype;
                    });
    for (const char *bits : {"3", "4", "5", "5310"}) /* levels of equal distance: other bytes in every table */
        for (int group : {4, 12, 33})
            for (bool fine : {false, true})
                add("uniform codebook, bits " + std::string(bits) + ", group " + std::to_string(group) +
                        (fine ? ", fine" : ""),
                    [&](Case &c) {
                        c.codebook = TQ_CODEBOOK_UNIFORM, c.key_bits = bits, c.group = group, c.fine = fine;
                        c.lengths = {500, 129};
                    });
    /* pages of fewer than four tiles, in caches that are large enough for units of four */
    for (int pt : {32, 64, 96})
        for (const char *bits : {"3", "5310"})
            for (int group : {3, 7, 12})
                add("pages of " + std::to_string(pt) + " in large caches, bits " + bits + ", group " +
                        std::to_string(group),
                    [&](Case &c) {
                        c.page_tokens = pt, c.key_bits = bits, c.group = group, c.spare_pages = 150, c.even = 0;
                        c.lengths = {500, 31, 97}, c.starts = {70, 0, 33};
                    });
    for (int rows : {1, 3, 8, 12, 33})
        for (const char *bits : {"3", "5310"})
            for (bool fresh : {false, true})
                add("shifted, rows " + std::to_string(rows) + ", bits " + bits + (fresh ? ", fresh" : ""),
                    [&](Case &c) {
                        c.shifted = c.no_lse = true, c.key_bits = bits, c.heads = 1, c.lengths = {700, 150};
                        c.group = fresh ? 1 : rows, c.tokens = fresh ? rows : 1, c.fresh = fresh, c.sinks = 3,
                        c.window = 40, c.dtype = rows == 8 ? TQ_F32 : TQ_F16;
                    });
    for (const char *bits : {"1", "5"}) /* one width that the kernels for many rows do not have */
        add("12 rows, three kernels, bits " + std::string(bits),
            [&](Case &c) { c.key_bits = bits, c.group = 12, c.even = 0, c.lengths = {1500, 700, 3}; });
    add_shares(add);
    add_many_queries(add);
    add_moments(&cases);
    add_variance(&cases);
    add_ragged(&cases);
    add_wide_heads(&cases);
    return cases;
}

#endif
