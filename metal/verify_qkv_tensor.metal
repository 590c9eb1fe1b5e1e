// verify_qkv.metal whose 4-bit weights of bfloat16 rows go to an M5's tensor units.
#include "tensor_tile.h"
#include "verify_qkv.metal"
