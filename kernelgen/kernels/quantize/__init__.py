"""Host sides of the quantising kernels."""
