/* Appending of wide heads, for append_harness.cu. */
#ifndef TQ_TESTS_APPEND_WIDE_H
#define TQ_TESTS_APPEND_WIDE_H

// Not with the sphere codebook, groups of 16, or plans that are not plain.
static const int WIDE_DIMS[] = {264, 320, 512};

static std::vector<int> all_dims()
{
    std::vector<int> dims(std::begin(DIMS), std::end(DIMS));
    dims.insert(dims.end(), std::begin(WIDE_DIMS), std::end(WIDE_DIMS));
    return dims;
}

/** Checks heads of more than 256 channels: every width, rotation and scale, keys with moments, and tries. */
static void check_wide_appends(int thin)
{
    const int widths[] = {1, 2, 3, 4, 5, 6, 8};
    Random random(8);
    int n = 0;
    for (int dim : WIDE_DIMS)
        for (int i = 0; i < 28; i++) {
            Case c;
            const int groups = (dim + TQ_TILE - 1) / TQ_TILE;
            c.dim = dim, c.key_bits = {widths[i % 7]}, c.value_bits = {widths[6 - i % 7]};
            if (i >= 14)
                c.key_bits = mixed_bits(groups, i % 2, random), c.value_bits = mixed_bits(groups, true, random);
            c.rotation = i % 7 == 5 ? TQ_ROTATION_DENSE : i % 7 == 6 ? TQ_ROTATION_NONE : TQ_ROTATION_HADAMARD;
            c.law = i % 3 ? TQ_CODEBOOK_NORMAL : TQ_CODEBOOK_UNIFORM, c.dtype = i % 3, c.centred = i % 2;
            c.stepped = i % 5 == 3, c.tokens_first = i % 4 == 1, c.sinks = i % 3, c.window = i % 4 == 2 ? 20 : 0;
            c.page_tokens = i % 6 == 4 ? 96 : 128, c.bad_numbers = i == 9 ? 2 : 0, c.bad_pages = i == 10;
            if (i % 3 == 1) c.pairs = dim / 16 * 8, c.metric = i % 2 ? 5 : 0, c.neighbours = i % 4 == 1;
            if (i % 4 == 0) c.tries = 3 + i % 3 / 2 * 2;
            else c.scale = i % 4;
            c.appends = c.bad_pages ? std::vector<int>{300} : std::vector<int>{61, 1, 36, 3, 1, 65, 1};
            c.max_pages = 1 + 400 / c.page_tokens;
            c.name = "wide, dim " + std::to_string(dim) + ", case " + std::to_string(i);
            if (n++ % thin == 0) run(c);
        }
}

#endif
