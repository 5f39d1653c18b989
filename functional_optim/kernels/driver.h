/* The function of a library. Before it stand `BLOCKS`, and of a graph:

   SIZES     how many sizes a tensor has
   PLACES    where in a row of the table the places of kept values begin
   COLUMNS   the length of such a row
   WIDTH     how many addresses and constants a tensor has
   OUTPUTS   how many sums a call returns
   step      goes through the phases of a tensor, unless there are BLOCKS
*/
extern "C" void SYMBOL(const int64_t* call)
{
    const int64_t *table = (const int64_t*)call[0], *rows = (const int64_t*)call[2];
    const int64_t first = call[1], count = call[4], threads = call[6];
    const int64_t several = BLOCKS ? first : count;
    const int64_t* given = (const int64_t*)call[3];
    const double* numbers = (const double*)call[5];
    double *totals = (double*)call[7], *parts = (double*)call[10];
    const Reader read = (Reader)call[8];
    const Team team = (Team)call[9];
    int64_t* grads = (int64_t*)(parts + OUTPUTS * several);
    for (int64_t i = 0; i < count; ++i)
        grads[i] = read ? (int64_t)read((void*)given[i]) : given[i];
    memset(parts, 0, 8 * OUTPUTS * several);
#if BLOCKS
    /* blocks of tensors, each of which is computed separately */
    auto block = [&](int64_t b, int64_t) {
        const int64_t* own = table + 3 * b;
        const Tensor t = {nullptr, nullptr, rows + WIDTH * own[0], numbers, nullptr,
                          (void*)grads[own[0]]};
        chunk0(t, own[1], own[2], parts + OUTPUTS * b);
    };
    const int64_t least = several < 1024 ? 1 : 8; /* of few blocks, eight are a long wait */
    share(team, threads, several, least, 2 * threads, block);
#else
    /* tensors, through all of their phases: large ones by all threads, then small ones by one each */
    const int64_t alone = call[13], own = call[14], phase = call[15]; /* -1: all of them */
    const int64_t* const homes = (const int64_t*)call[16]; /* of tensors whose phases are apart */
    const int64_t* order = (const int64_t*)call[11];
    char* const scratch = (char*)call[12];
    auto tensor = [&](int64_t i, char* memory) {
        const int64_t* mine = table + COLUMNS * i;
        return Tensor{mine, mine + PLACES, rows + WIDTH * i, numbers, memory, (void*)grads[i]};
    };
    /* scratch memory: for each thread what belongs to rows, then that of tensors */
    char* const shared = scratch + own * threads;
    for (int64_t b = 0; b < first; ++b) {
        const Tensor t = tensor(order[b], homes ? (char*)homes[order[b]] : shared);
        const int64_t chunks = t.size[SIZES + 1];
        step(t, parts + OUTPUTS * order[b], phase, [&](auto chunk) {
            share(team, threads, chunks, 2, chunks, [&](int64_t k, int64_t thread) {
                chunk(k, scratch + own * thread);
            });
        });
    }
    share(team, threads, count - first, 1, count, [&](int64_t i, int64_t thread) {
        const int64_t b = first + i;
        char* const memory = homes ? (char*)homes[order[b]] : shared + alone * thread;
        const Tensor t = tensor(order[b], memory);
        const int64_t chunks = t.size[SIZES + 1];
        step(t, parts + OUTPUTS * order[b], phase, [&](auto chunk) {
            for (int64_t k = 0; k < chunks; ++k) chunk(k, scratch + own * thread);
        });
    });
#endif
    for (int64_t i = 0; i < several; ++i)
        for (int64_t j = 0; j < OUTPUTS; ++j) totals[j] += parts[OUTPUTS * i + j];
}
