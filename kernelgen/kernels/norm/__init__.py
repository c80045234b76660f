"""Normalisation kernels, one module per kernel."""
