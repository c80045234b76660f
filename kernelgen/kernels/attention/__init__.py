"""Attention kernels, one module per kernel."""
