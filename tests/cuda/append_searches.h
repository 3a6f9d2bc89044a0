// Cases of append_harness.cu with tries.

/** As check_appends, check_many_appends, check_moments and check_single_appends, with tries: through every kernel. */
static void check_searches(int thin)
{
    Random random(11);
    int n = 0;
    auto go = [&](Case c, const char *what) {
        c.name = std::string("tries ") + std::to_string(c.tries) + ", " + what + ", dim " + std::to_string(c.dim) +
                 ", bits " + std::to_string(c.key_bits[0]) + "/" + std::to_string(c.value_bits[0]) + ", dtype " +
                 std::to_string(c.dtype) + ", rotation " + std::to_string(c.rotation) + ", group " +
                 std::to_string(c.group);
        if (n++ % thin == 0) run(c);
    };
    const int widths[] = {1, 2, 3, 4, 5, 6, 8};
    for (int dim : DIMS)
        for (int i = 0; i < 7; i++) {
            Case c;
            c.dim = dim, c.tries = 3 + 2 * ((i + dim / 8) % 3), c.key_bits = {widths[i]},
            c.value_bits = {widths[6 - i]};
            c.law = i % 2, c.dtype = (i + dim / 8) % 3, c.tokens_first = i % 2, c.appends = {61, 1, 36, 3, 1};
            go(c, "width x dim");
            c.group = i % 3 ? TQ_TILE : TQ_FINE_GROUP, c.centred = i % 2, c.stepped = i % 4 > 1;
            const int groups = (dim + c.group - 1) / c.group;
            c.key_bits = mixed_bits(groups, i % 2, random), c.value_bits = mixed_bits(groups, i % 2, random);
            c.rotation = i == 5 ? TQ_ROTATION_DENSE : i == 6 ? TQ_ROTATION_NONE : TQ_ROTATION_HADAMARD;
            c.bad_numbers = i == 3 ? 2 : 0;
            go(c, "mixed plan");
        }
    for (int i = 0; i < HARD_ROWS * 6; i++) { // prompts
        Case c;
        c.batch = 2, c.heads = 4, c.tries = 3 + 2 * (i % 3), c.key_bits = {1 + i % 4}, c.value_bits = {4 - i % 4};
        c.rows = i % 3 ? i / 6 : -1, c.dtype = i / 2 % 2 ? TQ_F16 : TQ_BF16, c.law = i % 2, c.centred = i % 3 == 2;
        const int dims[] = {128, 64, 256, 80, 96};
        c.dim = dims[i % 5], c.page_tokens = i % 4 == 1 ? 96 : 128, c.padding = {0, 137};
        if (i % 5 == 3) c.key_bits = {4, 1, 3, 2}, c.value_bits = {2, 2, 3};
        c.appends = {50 + 13 * i, 3000, 3}, c.max_pages = 5000 / c.page_tokens, c.bad_numbers = i % 7 == 6 ? 3 : 0;
        go(c, "many tokens");
    }
    for (int dim : {64, 128, 256})
        for (int i = 0; i < 6; i++) {
            Case c;
            c.dim = dim, c.tries = 3 + 2 * (i % 3), c.key_bits = {4 - i % 4}, c.value_bits = {i == 5 ? 0 : 2 + i % 3};
            c.dtype = i % 2 ? TQ_F16 : TQ_BF16, c.centred = i % 3 == 1, c.window = i % 3 == 2 ? 20 : 0;
            c.padding = {0, 37}, c.rows = i >= 3 ? i % HARD_ROWS : -1, c.appends = std::vector<int>(80, 1);
            go(c, "single tokens");
        }
    for (int dim : {64, 80, 128, 256})
        for (int i = 0; i < 3; i++) {
            Case c;
            c.dim = dim, c.tries = 3 + 2 * i, c.pairs = dim / 16 * 8, c.metric = 1 + 2 * i, c.key_bits = {4 - i},
            c.value_bits = {3 + i % 2}, c.dtype = i ? TQ_BF16 : TQ_F16, c.centred = i == 1;
            c.appends = {700, 1, 33, 150, 1}, c.max_pages = 8;
            go(c, "moments");
        }
}
