/* Products of matrices for the tests: what a row holds does not depend on how many rows there are.
 *
 * MLX calls cblas_sgemm, always in row-major order. The reference BLAS of its Linux wheel has rows
 * like these, too, at a tenth of the speed; faster libraries sum in another order for other shapes.
 */
enum { TRANSPOSED = 112, LANES = 16 };

/* c[n] += x[k] times the rows of b, one after the other. */
static void add_rows(int n, int k, const float *x, const float *b, long ldb, float *restrict c) {
    int l = 0;
    for (; l + 4 <= k; l += 4, b += 4 * ldb)
        for (int j = 0; j < n; j++)
            c[j] = c[j] + x[l] * b[j] + x[l + 1] * b[ldb + j] + x[l + 2] * b[2 * ldb + j] +
                   x[l + 3] * b[3 * ldb + j];
    for (; l < k; l++, b += ldb)
        for (int j = 0; j < n; j++) c[j] += x[l] * b[j];
}

/* The sum of x[k] * b[k], by lanes. */
static float dot(int k, const float *x, const float *b) {
    float lanes[LANES] = {0}, sum = 0;
    int l = 0;
    for (; l + LANES <= k; l += LANES)
        for (int i = 0; i < LANES; i++) lanes[i] += x[l + i] * b[l + i];
    for (int i = 0; l + i < k; i++) lanes[i] += x[l + i] * b[l + i];
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                 const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    (void)order;
    float x[k > 0 ? k : 1];
    for (long i = 0; i < m; i++) {
        float *row = c + i * ldc;
        for (long l = 0; l < k; l++)
            x[l] = alpha * (trans_a == TRANSPOSED ? a[l * lda + i] : a[i * lda + l]);
        for (long j = 0; j < n; j++) row[j] = beta == 0 ? 0 : beta * row[j];
        if (trans_b == TRANSPOSED)
            for (long j = 0; j < n; j++) row[j] += dot(k, x, b + j * ldb);
        else
            add_rows(n, k, x, b, ldb, row);
    }
}
