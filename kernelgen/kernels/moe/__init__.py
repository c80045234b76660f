"""Mixture-of-experts kernels, one module per kernel."""
