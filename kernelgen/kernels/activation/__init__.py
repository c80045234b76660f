"""Activation kernels, one module per kernel."""
