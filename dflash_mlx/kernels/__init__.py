"""Metal kernels for verifying a block of drafted rows, one module per kernel.

Every module holds the same three things:

- a class that is constructed with the factory of its kernels, `mx.fast.metal_kernel` unless told
  otherwise (the tests pass a class with the same signature that runs Metal on the CPU), and that
  is called with MLX arrays;
- its reference: the same arguments and result in plain MLX, which is what runs without Metal and
  what the kernel is tested against;
- the rules for shapes and dtypes, broken with a `KernelError`.

The kernels themselves are functions in `metal/*.metal`; the text handed to the factory as `source`
only declares threadgroup memory and calls them. When stock kernels are the better choice is decided
by `choose`, and `modules` puts ours into a model.

Each row's result depends on that row, the weights and the shapes alone, bit for bit: never on how
many rows share the call. That makes drafted text equal to undrafted text when both use the kernels.
"""
