"""Kernels that write into paged caches."""
