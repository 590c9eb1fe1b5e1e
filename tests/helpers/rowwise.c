/* Products of matrices for the tests: what an entry holds depends on its row and its column alone.
 *
 * MLX calls cblas_sgemm, always in row-major order. The reference BLAS of its Linux wheel adds an
 * entry's products one after the other, however many rows there are and however b lies in memory,
 * and so does this, at ten times the speed; faster libraries sum in another order for other shapes.
 */
enum { TRANSPOSED = 112, ROWS = 8, COLUMNS = 8 };
typedef float Rows __attribute__((vector_size(ROWS * sizeof(float))));

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

/* At most ROWS rows of c[n] += x[k] times the columns of b, which lie one after the other. */
static void add_columns(int rows, int n, int k, const Rows *x, const float *b, long ldb, float *c,
                        long ldc) {
    for (int j = 0; j < n; j += COLUMNS) {
        const float *columns[COLUMNS];
        Rows sums[COLUMNS];
        for (int q = 0; q < COLUMNS; q++) {
            int column = j + q < n ? j + q : n - 1;
            columns[q] = b + column * ldb;
            for (int r = 0; r < ROWS; r++) sums[q][r] = r < rows ? c[r * ldc + column] : 0;
        }
        for (int l = 0; l < k; l++)
#pragma GCC unroll 8
            for (int q = 0; q < COLUMNS; q++) sums[q] += x[l] * columns[q][l];
        for (int q = 0; q < COLUMNS && j + q < n; q++)
            for (int r = 0; r < rows; r++) c[r * ldc + j + q] = sums[q][r];
    }
}

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                 const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    (void)order;
    Rows x[k > 0 ? k : 1];
    float row[k > 0 ? k : 1];
    for (long i = 0; i < m; i++)
        for (long j = 0; j < n; j++) c[i * ldc + j] = beta == 0 ? 0 : beta * c[i * ldc + j];
    for (long first = 0; first < m; first += ROWS) {
        int rows = m - first < ROWS ? m - first : ROWS;
        for (int r = 0; r < ROWS; r++) {
            long i = first + (r < rows ? r : 0);
            for (long l = 0; l < k; l++) {
                row[l] = alpha * (trans_a == TRANSPOSED ? a[l * lda + i] : a[i * lda + l]);
                x[l][r] = row[l];
            }
            if (trans_b != TRANSPOSED && r < rows) add_rows(n, k, row, b, ldb, c + i * ldc);
        }
        if (trans_b == TRANSPOSED) add_columns(rows, n, k, x, b, ldb, c + first * ldc, ldc);
    }
}
