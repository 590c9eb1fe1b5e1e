#include "host/tensors.h"
