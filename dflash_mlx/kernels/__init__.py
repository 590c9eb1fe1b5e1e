"""Metal kernels for verifying a block of drafted rows, one module per kernel; `Kernels` lists them.

Every module has its `Kernel`s, which are data, and a `Launcher` with the check of a form's first
launch against the reference in plain MLX, the refusal of other shapes and dtypes (`KernelError`),
and small calls in every form (`instances`). The kernels are functions in `metal/*.metal`; a
`Kernel`'s body declares memory and calls them. `choose` keeps what was timed, and `modules` and
`fused` put them into a model.

Each row's result depends on that row, the weights and the shapes only, bit for bit, never on the
number of rows. So drafted text equals undrafted text when both use the kernels. On an M5's tensor
units only the device can show that, so exact decoding keeps off them.
"""
