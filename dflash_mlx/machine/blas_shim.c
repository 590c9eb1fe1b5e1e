/* Products of f32 matrices for MLX on a CPU: fast for few rows, and no row depends on the others.
 *
 * Every entry of a product is summed in one order, on each processor and in each memory layout:
 * (s0 + s1) + (s2 + s3), where s_i adds the products with k = i mod 4 one after the other. So a
 * row's bits do not depend on how many rows share the product.
 *
 * A product and a sum are one operation, with one rounding, only where the source says `fma_...`.
 * Compilers that may choose (-ffp-contract=fast) fuse in one loop and not in its remainder: with
 * gcc 13 to 16, a row then had other bits among rows than by itself. So contraction is off.
 *
 * Decoding multiplies 1 to 16 rows by large weights. Other libraries pack the weights first, which
 * takes as long as a product. Here the weights are read once and in order, and the rows are packed.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if !defined(__FMA__) && !defined(__aarch64__) && !defined(__FP_FAST_FMAF)
#error "this processor has no instruction that multiplies and adds at once"
#endif
#if defined(__FAST_MATH__)
#error "this compiler's options let it change the order of sums (-ffast-math)"
#endif

/* Sums [VECTORS][COLUMNS] stay in registers: there are 32 of these, or 16. */
#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 4, COLUMNS = 6, MOST_ROWS = 4 };
#elif defined(__AVX2__)
enum { LANES = 8, VECTORS = 2, COLUMNS = 6, MOST_ROWS = 2 };
#elif defined(__aarch64__)
enum { LANES = 4, VECTORS = 4, COLUMNS = 6, MOST_ROWS = 4 };
#else
enum { LANES = 4, VECTORS = 2, COLUMNS = 4, MOST_ROWS = 2 };
#endif
enum { ROW_MAJOR = 101, TRANSPOSED = 112 };
enum { QUAD = 4, ROWS = LANES / QUAD }; /* rows in a vector of packed rows, four products of each */
enum { LINE = 16, PACKED = 1 << 16, TURNED = 1 << 18, WORTH_A_THREAD = 1 << 20 }; /* floats */
enum { DEEP = 2048, ONE_ROW = 8, MANY_ROWS = 64 }; /* ONE_ROW: columns at once */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
typedef ptrdiff_t Index;
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));
typedef float Quad __attribute__((vector_size(QUAD * sizeof(float)), aligned(sizeof(float))));

/* a * b + c, rounded once. */
INLINE float fma_scalar(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

INLINE Quad fma_quad(Quad a, Quad b, Quad c) {
#if defined(__FMA__)
    return (Quad)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif defined(__aarch64__)
    return (Quad)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < QUAD; i++) c[i] = fma_scalar(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE Vector fma_vector(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return (Vector)fma_quad((Quad)a, (Quad)b, (Quad)c); /* LANES is QUAD */
#endif
}

INLINE Vector repeat(float x) { return x - (Vector){0}; }

/* c [m, n] = alpha * a [m, k] @ b [k, n] + beta * c; a[i, l] lies at i * a_row + l * a_column. */
typedef struct {
    int b_transposed;
    Index m, n, k;
    float alpha;
    const float *a;
    Index a_row, a_column;
    const float *b;
    Index ldb;
    float beta;
    float *c;
    Index ldc;
} Product;

INLINE void put(const Product *p, float *c, float sum) {
    *c = p->beta == 0 ? p->alpha * sum : p->alpha * sum + p->beta * *c;
}

INLINE Vector repeat_quad(const float *w) {
#if defined(__AVX512F__)
    return (Vector)_mm512_broadcast_f32x4(_mm_loadu_ps(w));
#elif defined(__AVX2__)
    return (Vector)_mm256_broadcast_ps((const __m128 *)w);
#else
    return *(const Vector *)w;
#endif
}

/* b is transposed: its columns lie one after the other, as the rows of a layer's weights do. */

INLINE void add_quads(const int vectors, const int columns, Vector sums[4][COLUMNS], const float *x,
                      const float *w, Index ldw) {
    UNROLL for (int c = 0; c < columns; c++) {
        Vector quad = repeat_quad(w + c * ldw);
        UNROLL for (int v = 0; v < vectors; v++) 
            sums[v][c] = fma_vector(((const Vector *)x)[v], quad, sums[v][c]);
    }
}

/* A tile of c: packed rows x by `columns` columns of b, of which the first `skip` are done. */
INLINE void tile(const int vectors, const int columns, const Product *p, const float *x, Index row,
                 Index column, int skip) {
    Vector sums[4][COLUMNS];
    const float *w = p->b + column * p->ldb;
    const Index width = vectors * ROWS, ldw = p->ldb, k = p->k;
    UNROLL for (int v = 0; v < vectors; v++)
        UNROLL for (int c = 0; c < columns; c++) sums[v][c] = (Vector){0};
    Index l = 0;
    for (; l + LINE <= k; l += LINE) {
        UNROLL for (int c = 0; c < columns; c++)
            __builtin_prefetch(w + (columns + c) * ldw + l);
        UNROLL for (int q = l; q < l + LINE; q += QUAD)
            add_quads(vectors, columns, sums, x + q * width, w + q, ldw);
    }
    for (; l + QUAD <= k; l += QUAD)
        add_quads(vectors, columns, sums, x + l * width, w + l, ldw);
    if (l < k) {
        float rest[COLUMNS][QUAD] = {{0}};
        for (int c = 0; c < columns; c++)
            memcpy(rest[c], w + c * ldw + l, (k - l) * sizeof(float));
        add_quads(vectors, columns, sums, x + l * width, rest[0], QUAD);
    }
    UNROLL for (int v = 0; v < vectors; v++) {
        float lanes[COLUMNS][LANES];
        UNROLL for (int c = 0; c < columns; c++) memcpy(lanes[c], &sums[v][c], sizeof(Vector));
        for (Index r = 0, at = row + v * ROWS; r < ROWS && at < p->m; r++, at++)
            for (int c = skip; c < columns; c++) {
                const float *s = lanes[c] + QUAD * r;
                put(p, p->c + at * p->ldc + column + c, (s[0] + s[1]) + (s[2] + s[3]));
            }
    }
}

/* As `tile`, for packed rows from `row` to `end`: the columns stay in the first cache meanwhile. */
INLINE void tiles(const int columns, const Product *p, const float *x, Index row, Index end,
                  Index column, int skip) {
    for (; row < end; x += VECTORS * ROWS * ((p->k + QUAD - 1) / QUAD * QUAD)) {
        Index vectors = (end - row + ROWS - 1) / ROWS;
        switch (vectors < VECTORS ? vectors : VECTORS) {
            case 1: tile(1, columns, p, x, row, column, skip); break;
            case 2: tile(2, columns, p, x, row, column, skip); break;
            case 3: tile(3, columns, p, x, row, column, skip); break;
            case 4: tile(4, columns, p, x, row, column, skip); break;
        }
        row += VECTORS * ROWS;
    }
}

/* Quads of k, each of all rows of a panel; zeros where there is no row or no k. */
static void pack(const Product *p, Index row, Index end, float *x) {
    for (; row < end; row += VECTORS * ROWS) {
        Index vectors = (end - row + ROWS - 1) / ROWS;
        Index width = (vectors < VECTORS ? vectors : VECTORS) * ROWS;
        for (Index l = 0; l < p->k; l += QUAD, x += width * QUAD) {
            const float *a = p->a + row * p->a_row + l * p->a_column;
            if (row + width > end || l + QUAD > p->k)
                for (Index i = 0; i < width * QUAD; i++) {
                    Index r = i / QUAD, q = i % QUAD;
                    x[i] = row + r < end && l + q < p->k ? a[r * p->a_row + q * p->a_column] : 0;
                }
            else if (p->a_column == 1)
                for (Index r = 0; r < width; r++)
                    memcpy(x + r * QUAD, a + r * p->a_row, QUAD * sizeof(float));
            else
                for (Index r = 0; r < width; r++)
                    for (int q = 0; q < QUAD; q++)
                        x[r * QUAD + q] = a[r * p->a_row + q * p->a_column];
        }
    }
}

/* One row by `columns` columns of b, as both lie: a packed row would leave its vectors half empty. */
INLINE void dot(const int columns, const Product *p, Index column) {
    Quad sums[ONE_ROW] = {{0}};
    const float *x = p->a, *w = p->b + column * p->ldb;
    const Index ldw = p->ldb, k = p->k;
    Index l = 0;
    for (; l + LINE <= k; l += LINE) {
        UNROLL for (int c = 0; c < columns; c++) __builtin_prefetch(w + (columns + c) * ldw + l);
        UNROLL for (int q = 0; q < LINE; q += QUAD) {
            Quad quad = *(const Quad *)(x + l + q);
            UNROLL for (int c = 0; c < columns; c++)
                sums[c] = fma_quad(quad, *(const Quad *)(w + c * ldw + l + q), sums[c]);
        }
    }
    for (; l < k; l += QUAD) {
        Index rest = (k - l < QUAD ? k - l : QUAD) * sizeof(float);
        Quad quad = {0};
        memcpy(&quad, x + l, rest);
        UNROLL for (int c = 0; c < columns; c++) {
            Quad of_b = {0};
            memcpy(&of_b, w + c * ldw + l, rest);
            sums[c] = fma_quad(quad, of_b, sums[c]);
        }
    }
    UNROLL for (int c = 0; c < columns; c++)
        put(p, p->c + column + c, (sums[c][0] + sums[c][1]) + (sums[c][2] + sums[c][3]));
}

static void multiply_row(const Product *p) {
    Index j = 0;
    for (; j + ONE_ROW <= p->n; j += ONE_ROW) dot(ONE_ROW, p, j);
    for (; j < p->n; j++) dot(1, p, j);
}

static void multiply_transposed(const Product *p) {
    const Index panel = VECTORS * ROWS, depth = (p->k + QUAD - 1) / QUAD * QUAD;
    Index most = PACKED / (depth + 1) / panel * panel, rows;
    most = most < 16 ? 16 : most;
    rows = most < p->m ? most : (p->m + panel - 1) / panel * panel;
    float *x = aligned_alloc(64, (rows * depth + LINE) / LINE * LINE * sizeof(float));
    if (x == NULL) abort();
    for (Index row = 0; row < p->m; row += rows) {
        Index end = row + rows < p->m ? row + rows : p->m, j = 0;
        pack(p, row, end, x);
        for (; j + COLUMNS <= p->n; j += COLUMNS) tiles(COLUMNS, p, x, row, end, j, 0);
        if (j < p->n && p->n >= COLUMNS)
            tiles(COLUMNS, p, x, row, end, p->n - COLUMNS, (int)(COLUMNS - (p->n - j)));
        else
            for (; j < p->n; j++) tiles(1, p, x, row, end, j, 0);
    }
    free(x);
}

/* b is not transposed: its rows lie one after the other, as an attention's values do. */

/* LANES columns of `rows` rows of c; the first `skip` columns are done. */
INLINE void strip(const int rows, const Product *p, Index row, Index column, int skip) {
    Vector sums[4][QUAD];
    const float *a = p->a + row * p->a_row, *b = p->b + column;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < QUAD; i++) sums[r][i] = (Vector){0};
    Index l = 0;
    for (; l + QUAD <= p->k; l += QUAD)
        UNROLL for (int i = 0; i < QUAD; i++) {
            Vector v = *(const Vector *)(b + (l + i) * p->ldb);
            UNROLL for (int r = 0; r < rows; r++) {
                Vector x = repeat(a[r * p->a_row + (l + i) * p->a_column]);
                sums[r][i] = fma_vector(x, v, sums[r][i]);
            }
        }
    UNROLL for (int i = 0; i < QUAD - 1; i++)
        if (l + i < p->k) {
            Vector v = *(const Vector *)(b + (l + i) * p->ldb);
            UNROLL for (int r = 0; r < rows; r++) {
                Vector x = repeat(a[r * p->a_row + (l + i) * p->a_column]);
                sums[r][i] = fma_vector(x, v, sums[r][i]);
            }
        }
    UNROLL for (int r = 0; r < rows; r++) {
        Vector sum = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
        float *c = p->c + (row + r) * p->ldc + column;
        for (int i = skip; i < LANES; i++) put(p, c + i, sum[i]);
    }
}

static void strips(const Product *p, Index column, int skip) {
    Index row = 0;
    if (MOST_ROWS >= 4)
        for (; row + 4 <= p->m; row += 4) strip(4, p, row, column, skip);
    for (; row + 2 <= p->m; row += 2) strip(2, p, row, column, skip);
    for (; row < p->m; row++) strip(1, p, row, column, skip);
}

static void multiply(const Product *p) {
    Index j = 0;
    for (; j + LANES <= p->n; j += LANES) strips(p, j, 0);
    if (j < p->n && p->n >= LANES) {
        strips(p, p->n - LANES, (int)(LANES - (p->n - j)));
        return;
    }
    for (; j < p->n; j++)
        for (Index row = 0; row < p->m; row++) {
            const float *a = p->a + row * p->a_row, *b = p->b + j;
            float sums[QUAD] = {0};
            for (Index l = 0; l < p->k; l++)
                sums[l % QUAD] = fma_scalar(a[l * p->a_column], b[l * p->ldb], sums[l % QUAD]);
            put(p, p->c + row * p->ldc + j, (sums[0] + sums[1]) + (sums[2] + sums[3]));
        }
}

/* For many rows: some of b's columns at a time are copied one after the other. */
static void transpose_and_multiply(const Product *p) {
    Index most = TURNED / (p->k + 1) / LINE * LINE + LINE;
    float *columns = aligned_alloc(64, most * (p->k + LINE) * sizeof(float));
    if (columns == NULL) abort();
    for (Index j = 0; j < p->n; j += most) {
        Product part = *p;
        part.n = p->n - j < most ? p->n - j : most;
        for (Index first = 0; first < part.n; first += LINE)
            for (Index l = 0; l < p->k; l++) {
                const float *b = p->b + l * p->ldb + j;
                for (Index at = first; at < first + LINE && at < part.n; at++)
                    columns[at * p->k + l] = b[at];
            }
        part.b_transposed = 1, part.b = columns, part.ldb = p->k, part.c = p->c + j;
        multiply_transposed(&part);
    }
    free(columns);
}

static void *run(void *product) {
    const Product *p = product;
    if (p->b_transposed && p->m == 1 && p->a_column == 1) multiply_row(p);
    else if (p->b_transposed) multiply_transposed(p);
    else if (p->m > MANY_ROWS) transpose_and_multiply(p);
    else multiply(p);
    return NULL;
}

#if defined(__clang__)
const char *dflash_compiler = "clang " __clang_version__;
#else
const char *dflash_compiler = "gcc " __VERSION__;
#endif

/* Written once, before MLX and its threads exist; only read after that. */
static int threads = 1, flush;

#if defined(__x86_64__)
enum { CAN_FLUSH = 1 };
static void flush_denormals_on_this_thread(void) {
    _mm_setcsr(_mm_getcsr() | 0x8040); /* flush results to zero (bit 15), inputs too (bit 6) */
}
#elif defined(__aarch64__)
enum { CAN_FLUSH = 1 };
static void flush_denormals_on_this_thread(void) {
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    __asm__ volatile("msr fpcr, %0" : : "r"(control | (UINT64_C(1) << 24)));
}
#else
enum { CAN_FLUSH = 0 };
static void flush_denormals_on_this_thread(void) {}
#endif

/* Returns whether denormals will be flushed to zero: asked for, and known for this processor. */
int dflash_configure(int thread_count, int flush_denormals) {
    threads = thread_count;
    flush = flush_denormals && CAN_FLUSH;
    return flush;
}

/* Every thread takes some of the columns. A thread that cannot be started is done without. */
static void share(const Product *whole) {
    Index parts = whole->n / COLUMNS < threads ? whole->n / COLUMNS : threads;
    Product product[parts];
    pthread_t thread[parts];
    int started[parts];
    for (Index i = 0; i < parts; i++) {
        Product *part = product + i;
        Index first = whole->n * i / parts, end = whole->n * (i + 1) / parts;
        *part = *whole;
        part->n = end - first;
        part->b += part->b_transposed ? first * part->ldb : first;
        part->c += first;
        started[i] = i + 1 < parts && pthread_create(thread + i, NULL, run, part) == 0;
        if (!started[i]) run(part);
    }
    for (Index i = 0; i < parts; i++)
        if (started[i]) pthread_join(thread[i], NULL);
}

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                 const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    if (order != ROW_MAJOR) { /* the transposed product */
        cblas_sgemm(ROW_MAJOR, trans_b, trans_a, n, m, k, alpha, b, ldb, a, lda, beta, c, ldc);
        return;
    }
    /* MLX runs each stream on a thread of its own, which nothing but its work can reach. */
    if (flush) flush_denormals_on_this_thread();
    Index a_row = trans_a >= TRANSPOSED ? 1 : lda, a_column = trans_a >= TRANSPOSED ? lda : 1;
    Index b_row = trans_b >= TRANSPOSED ? 1 : ldb;
    for (int l = 0; l == 0 || l < k; l += DEEP) { /* deeper columns would leave the first cache */
        Product product = {trans_b >= TRANSPOSED, m, n, k - l < DEEP ? k - l : DEEP, alpha,
                           a + l * a_column, a_row, a_column, b + l * b_row, ldb, beta, c, ldc};
        if (threads > 1 && (double)m * n * product.k > WORTH_A_THREAD && n >= 2 * COLUMNS)
            share(&product);
        else
            run(&product);
        beta = 1;
    }
}
