/* The matrix products that MLX calls, handed on to a faster BLAS.
 *
 * MLX calls cblas_sgemm with 32-bit sizes. numpy's bundled OpenBLAS has the same function under
 * another name (scipy_cblas_sgemm64_) and with 64-bit sizes, so it cannot simply stand in. blas.py
 * compiles this file with -DBLAS_INT=int64_t (or =int for a plain OpenBLAS), loads it before MLX,
 * and passes the addresses of the real functions to dflash_route.
 */
#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
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

typedef void sgemm(int order, int trans_a, int trans_b, BLAS_INT m, BLAS_INT n, BLAS_INT k,
                   float alpha, const float *a, BLAS_INT lda, const float *b, BLAS_INT ldb,
                   float beta, float *c, BLAS_INT ldc);
typedef void dgemm(int order, int trans_a, int trans_b, BLAS_INT m, BLAS_INT n, BLAS_INT k,
                   double alpha, const double *a, BLAS_INT lda, const double *b, BLAS_INT ldb,
                   double beta, double *c, BLAS_INT ldc);

/* Written once, before MLX and its threads exist; only read after that. */
static sgemm *real_sgemm;
static dgemm *real_dgemm;
static int flush;

/* Returns whether denormals will be flushed to zero: asked for, and known for this processor. */
int dflash_route(sgemm *to_sgemm, dgemm *to_dgemm, int flush_denormals) {
    real_sgemm = to_sgemm;
    real_dgemm = to_dgemm;
    flush = flush_denormals && CAN_FLUSH;
    return flush;
}

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                 const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    /* MLX runs each stream on a thread of its own, which nothing but its work can reach. */
    if (flush) flush_denormals_on_this_thread();
    real_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(int order, int trans_a, int trans_b, int m, int n, int k, double alpha,
                 const double *a, int lda, const double *b, int ldb, double beta, double *c,
                 int ldc) {
    real_dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
