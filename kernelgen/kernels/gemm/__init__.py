"""Matrix-product kernels, one module per kernel."""
