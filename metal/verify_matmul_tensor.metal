// verify_matmul.metal on an M5's tensor units, for rows of bfloat16 and 4-bit weights.
#include "tensor_tile.h"
#include "verify_matmul.metal"
