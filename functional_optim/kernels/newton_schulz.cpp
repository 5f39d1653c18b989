/* Newton-Schulz iterations of many matrices of one shape. Blocks of products stay in the caches.

   The step is X <- a X + (b A + c A^2) X with A = X X^T, where X is wide. Of symmetric products
   only the blocks on the diagonal and above it are computed. Each element of a product is one sum
   in one order, so the bits do not depend on the number of threads. */

#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 4;
#else
constexpr int LANES = 4, ROWS = 4;
#endif
constexpr int PANEL = 2 * LANES; /* columns that are computed together */
constexpr int64_t DEEP = 256;    /* units of a sum whose operands a core's cache holds */
typedef float V __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));

template <class T> INLINE T get(const void* p) { T x; memcpy(&x, p, sizeof x); return x; }
template <class T> INLINE void put(void* p, T x) { memcpy(p, &x, sizeof x); }
INLINE int64_t up(int64_t x) { return (x + PANEL - 1) / PANEL * PANEL; }

/* Matrices of float, and those of bfloat16. A unit is what one instruction multiplies. */
struct Floats {
    typedef float Element;
    typedef float Unit;
    INLINE V multiplied(V c, float a, V b) { return c + a * b; }
    INLINE V read(const float* p) { return get<V>(p); }
    INLINE void write(float* p, V x) { put(p, x); }
};

#if HALVES && defined(__AVX512BF16__)
struct Halves {
    typedef uint16_t Element;
    typedef uint32_t Unit;
    INLINE V multiplied(V c, uint32_t a, V b)
    {
        const U x = a - U{};
        asm("vdpbf16ps %1, %2, %0" : "+v"(c) : "v"(b), "v"(x));
        return c;
    }
    INLINE V read(const uint16_t* p) { return (V)(__builtin_convertvector(get<H>(p), U) << 16); }
    INLINE void write(uint16_t* p, V x)
    {
        H y;
        asm("vcvtneps2bf16 %1, %0" : "=v"(y) : "v"(x));
        put(p, y);
    }
};
typedef Halves Kind;
#else
typedef Floats Kind;
#endif

INLINE V rounded(V x)
{
    const U u = (U)x, r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    return x == x ? (V)r : x;
}

template <class K> struct Matrix {
    typename K::Element* first;
    int64_t stride;
    typename K::Element* row(int64_t i) const { return first + i * stride; }
};

/* y[j][i] = x[i][j] for a square of LANES elements. */
template <class T> static APART void transpose(T* y, int64_t to, const T* x, int64_t from)
{
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < LANES; ++j) y[j * to + i] = x[i * from + j];
}

/* C = alpha L R + beta D, where the columns of R are those of `right`, or for X X^T its rows. */
template <class K> struct Product {
    typedef typename K::Unit Unit;
    static constexpr int64_t PER = sizeof(Unit) / sizeof(typename K::Element);
    Matrix<K> C, L, right, D;
    float alpha, beta;
    int64_t height, depth;
    bool rows, symmetric;

    /* One panel of columns. b: memory for its units. sums: for those that the next units go on. */
    APART void panel(int64_t j, Unit* b, float* sums) const
    {
        const int64_t column = j * PANEL, units = depth / PER;
        const int64_t stop = symmetric ? column + PANEL : height;
        for (int64_t k = 0; k < units; k += DEEP) {
            const int64_t some = units - k < DEEP ? units - k : DEEP;
            pack(b, column, k, some);
            for (int64_t i = 0; i < stop; i += ROWS)
                tile(i, column, b, k, some, k + some < units, sums + i * PANEL);
        }
        for (int64_t i = 0; symmetric && i < column; i += LANES)
            for (int64_t c = column; c < column + PANEL; c += LANES)
                transpose(C.row(c) + i, C.stride, C.row(i) + c, C.stride);
    }

    /* b[k][column] */
    APART void pack(Unit* b, int64_t column, int64_t first, int64_t some) const
    {
        for (int64_t k = 0; rows && k < some; k += LANES)
            for (int64_t c = 0; c < PANEL; c += LANES) {
                const Unit* x = (const Unit*)right.row(column + c) + first + k;
                transpose(b + k * PANEL + c, PANEL, x, right.stride / PER);
            }
        for (int64_t k = 0; !rows && k < some; ++k) {
            const auto* x = right.row((first + k) * PER) + column;
            if (PER == 1) memcpy(b + k * PANEL, x, sizeof(Unit) * PANEL);
            for (int c = 0; PER == 2 && c < PANEL; ++c)
                b[k * PANEL + c] = (Unit)((uint32_t)x[c] | (uint32_t)x[right.stride + c] << 16);
        }
    }

    APART void tile(
        int64_t i, int64_t column, const Unit* b, int64_t first, int64_t some, bool more,
        float* sums) const
    {
        const Unit* a = (const Unit*)L.row(i) + first;
        const int64_t stride = L.stride / PER;
        V c[ROWS][2] = {};
        for (int r = 0; first && r < ROWS; ++r)
            for (int v = 0; v < 2; ++v) c[r][v] = get<V>(sums + r * PANEL + v * LANES);
        for (int64_t k = 0; k < some; ++k) {
            const V x = get<V>(b + k * PANEL), y = get<V>(b + k * PANEL + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                c[r][0] = K::multiplied(c[r][0], a[r * stride + k], x);
                c[r][1] = K::multiplied(c[r][1], a[r * stride + k], y);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
                const int64_t at = column + v * LANES;
                if (more) {
                    put(sums + r * PANEL + v * LANES, c[r][v]);
                    continue;
                }
                V x = alpha * c[r][v];
                if (D.first) x += beta * K::read(D.row(i + r) + at);
                K::write(C.row(i + r) + at, x);
            }
    }
};

enum { A, Q }; /* the squares that are A, and b A + c A^2 */

struct Call {
    const float* from;   /* (count, rows, columns) */
    float* to;
    int64_t count, rows, columns, steps;
    const double* triples; /* a, b, c of each step */
    int64_t together;    /* steps for which A is updated instead of computed again */
    int64_t rounds;      /* results to bfloat16 */
    int64_t threads;
    Team team;
    double eps, margin;
    bool tall() const { return rows > columns; }
    int64_t m() const { return tall() ? columns : rows; } /* X is m x n, m <= n */
    int64_t n() const { return tall() ? rows : columns; }
};

/* The matrices of one iteration. Memory behind their sizes is 0. */
template <class K> struct Space {
    typedef typename K::Element Element;
    const float* from;
    float* to;
    double* squares; /* of each panel of rows */
    Matrix<K> X, square[4];

    static constexpr int64_t SPARE = 64 / sizeof(Element); /* or rows share a set of a cache */
    static int64_t wide(const Call& c) { return up(c.n()) + SPARE; }
    static int64_t narrow(const Call& c) { return up(c.m()) + SPARE; }
    static int64_t kept(const Call& c) { return c.together > 1 ? 4 : 2; }
    static int64_t bytes(const Call& c)
    {
        const int64_t elements = up(c.m()) * (wide(c) + kept(c) * narrow(c));
        return elements * sizeof(Element) + up(c.n()) * 8;
    }

    APART Space(const Call& c, char* memory, int64_t i)
    {
        from = c.from + i * c.rows * c.columns;
        to = c.to + i * c.rows * c.columns;
        squares = (double*)memory;
        Element* next = (Element*)(memory + up(c.n()) * 8);
        X = {next, wide(c)};
        next += up(c.m()) * X.stride;
        for (int64_t k = 0; k < kept(c); ++k, next += up(c.m()) * narrow(c))
            square[k] = {next, narrow(c)};
    }

    /* A panel of P = Q + a I, of floats. */
    APART void add_identity(int64_t j, int64_t m, double a) const
    {
        for (int64_t i = j * PANEL; i < (j + 1) * PANEL; ++i) {
            memcpy(square[2].row(i), square[Q].row(i), m * sizeof(Element));
            square[2].row(i)[i] += (Element)a;
        }
    }

    /* Of some rows of what is given. */
    APART void measure(const Call& c, int64_t j) const
    {
        double sum[LANES] = {};
        const int64_t stop = (j + 1) * PANEL < c.rows ? (j + 1) * PANEL : c.rows;
        const float* x = from + j * PANEL * c.columns;
        const int64_t size = (stop - j * PANEL) * c.columns;
        for (int64_t k = 0; k < size; k += LANES)
            for (int l = 0; l < LANES; ++l) {
                const double y = k + l < size ? x[k + l] : 0;
                sum[l] += y * y;
            }
        squares[j] = 0;
        for (int l = 0; l < LANES; ++l) squares[j] += sum[l];
    }

    /* A panel of rows of X: what is given, divided by the norm. */
    APART void load(const Call& c, int64_t j) const
    {
        double sum = 0;
        for (int64_t k = 0; k * PANEL < c.rows; ++k) sum += squares[k];
        const double norm = c.margin * __builtin_sqrt(sum);
        const float by = (float)(norm < c.eps ? c.eps : norm);
        each_block(c, j, [&](int64_t i, int64_t k, const float* first, int64_t rows, int64_t size) {
            float x[LANES][LANES] = {}, y[LANES][LANES];
            for (int64_t r = 0; r < rows; ++r) memcpy(x[r], first + r * c.columns, 4 * size);
            if (c.tall()) transpose(y[0], LANES, x[0], LANES);
            for (int r = 0; r < LANES; ++r)
                K::write(X.row(i + r) + k, get<V>(c.tall() ? y[r] : x[r]) / by);
        });
    }

    APART void store(const Call& c, int64_t j) const
    {
        each_block(c, j, [&](int64_t i, int64_t k, const float* first, int64_t rows, int64_t size) {
            float x[LANES][LANES], y[LANES][LANES], *out = to + (first - from);
            for (int r = 0; r < LANES; ++r) {
                const V v = K::read(X.row(i + r) + k);
                put(x[r], c.rounds ? rounded(v) : v);
            }
            if (c.tall()) transpose(y[0], LANES, x[0], LANES);
            for (int64_t r = 0; r < rows; ++r)
                memcpy(out + r * c.columns, c.tall() ? y[r] : x[r], 4 * size);
        });
    }

    /* f(i, k, first, rows, size) for the squares of a panel of rows of X, at row i and column k:
       where they begin in what is given, and how many rows of which size they have there. */
    template <class F> void each_block(const Call& c, int64_t j, const F& f) const
    {
        const auto left = [](int64_t size, int64_t at) {
            return size < at ? 0 : size - at < LANES ? size - at : LANES;
        };
        for (int64_t i = j * PANEL; i < (j + 1) * PANEL; i += LANES)
            for (int64_t k = 0; k < up(c.n()); k += LANES) {
                const int64_t rows = left(c.m(), i), columns = left(c.n(), k);
                if (c.tall()) f(i, k, from + k * c.columns + i, columns, rows);
                else f(i, k, from + i * c.columns + k, rows, columns);
            }
    }
};

/* Who computes: a thread all of a matrix, or all threads parts of some matrices. */
template <class K> struct Crew {
    typedef typename K::Unit Unit;
    const Call& c;
    char* memory;
    int64_t spaces; /* matrices for which there is memory; that of threads lies behind it */
    int64_t first, count, thread; /* the matrices; the thread, or -1 */

    static int64_t deep(const Call& c) { return up(c.n()) < DEEP ? up(c.n()) : DEEP; }
    static int64_t bytes(const Call& c) { return 4 * PANEL * (deep(c) + up(c.m())); }

    /* f(space, j, units, sums) for each matrix and each j < tasks. */
    template <class F> void each(int64_t tasks, const F& f) const
    {
        const auto called = [](const void* f, const Space<K>& s, int64_t j, Unit* b, float* sums) {
            (*(const F*)f)(s, j, b, sums);
        };
        run(tasks, called, &f);
    }

    typedef void (*Task)(const void*, const Space<K>&, int64_t, Unit*, float*);

    APART void run(int64_t tasks, Task task, const void* f) const
    {
        const auto one = [&](int64_t i, int64_t at, int64_t j, int64_t t) {
            const Space<K> s(c, memory + at * Space<K>::bytes(c), i);
            Unit* own = (Unit*)(memory + spaces * Space<K>::bytes(c) + t * bytes(c));
            task(f, s, j, own, (float*)(own + PANEL * deep(c)));
        };
        if (thread >= 0)
            for (int64_t j = 0; j < tasks; ++j) one(first, thread, j, thread);
        else /* the most work first */
            share(c.team, c.threads, count * tasks, 1, 4 * c.threads, [&](int64_t k, int64_t t) {
                one(first + k % count, k % count, tasks - 1 - k / count, t);
            });
    }

    APART void iterate() const
    {
        typedef const Space<K>& S;
        const int64_t m = up(c.m()), n = up(c.n()), panels = m / PANEL;
        each(up(c.rows) / PANEL, [&](S s, int64_t j, Unit*, float*) { s.measure(c, j); });
        each(panels, [&](S s, int64_t j, Unit*, float*) { s.load(c, j); });
        for (int64_t k = 0; k < c.steps; k += c.together) {
            const double* t = c.triples + 3 * k;
            const int64_t some = c.steps - k < c.together ? c.steps - k : c.together;
            each(panels, [&](S s, int64_t j, Unit* b, float* sums) {
                const Product<K> own = {s.square[A], s.X, s.X, {}, 1, 0, m, n, true, true};
                own.panel(j, b, sums);
            });
            symmetric(Q, A, A, t[2], t[1], A); /* without the term a I */
            int P = Q, T = 3;
            if (some > 1) {
                P = 2;
                each(panels, [&](S s, int64_t j, Unit*, float*) { s.add_identity(j, m, t[0]); });
            }
            for (int64_t l = 1; l < some; ++l, t += 3) {
                symmetric(T, A, Q, 1, t[0], A);
                symmetric(A, T, Q, 1, t[0], T);
                symmetric(Q, A, A, t[5], t[4], A);
                symmetric(T, Q, P, 1, t[3], P);
                const int old = P;
                P = T, T = old;
            }
            const float a = some > 1 ? 0 : (float)t[0];
            each(n / PANEL, [&](S s, int64_t j, Unit* b, float* sums) {
                const Matrix<K> D = {some > 1 ? nullptr : s.X.first, s.X.stride};
                const Product<K> own = {s.X, s.square[P], s.X, D, 1, a, m, m, false, false};
                own.panel(j, b, sums);
            });
        }
        each(panels, [&](S s, int64_t j, Unit*, float*) { s.store(c, j); });
    }

    /* C = alpha L R + beta D of symmetric matrices that commute. */
    APART void symmetric(int C, int L, int R, double alpha, double beta, int D) const
    {
        const int64_t m = up(c.m());
        each(m / PANEL, [&](const Space<K>& s, int64_t j, Unit* b, float* sums) {
            const Product<K> own = {s.square[C], s.square[L], s.square[R], s.square[D],
                                    (float)alpha, (float)beta, m, m, false, true};
            own.panel(j, b, sums);
        });
    }
};

/* The matrices, each by one thread; the last ones by all threads if they are large. */
/* Whether there was memory. */
template <class K> static bool all(const Call& c)
{
    const bool large = c.threads > 1 && up(c.m()) * up(c.n()) > (1 << 15);
    const int64_t rest = large ? c.count % c.threads : 0, whole = c.count - rest;
    const int64_t used = whole < c.threads ? whole : c.threads, spaces = used > rest ? used : rest;
    char* all = (char*)malloc(64 + spaces * Space<K>::bytes(c) + c.threads * Crew<K>::bytes(c));
    if (!all) return false;
    char* memory = all + (64 - (uintptr_t)all % 64);
    if (whole) share(c.team, used, whole, 1, 2 * used, [&](int64_t i, int64_t thread) {
        Crew<K>{c, memory, spaces, i, 1, thread}.iterate();
    });
    if (rest) Crew<K>{c, memory, spaces, whole, rest, -1}.iterate();
    free(all);
    return true;
}

extern "C" void SYMBOL(int64_t* call)
{
    const double* numbers = (const double*)call[10]; /* a lower bound, a factor, the triples */
    const Call c = {(const float*)call[0], (float*)call[1], call[2], call[3], call[4], call[5],
                    numbers + 2, call[6], call[7], call[8], (Team)call[9], numbers[0], numbers[1]};
    call[11] = all<Kind>(c);
}
