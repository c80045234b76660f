"""The public functions: check the tensors, make the problem, choose, run. One file per op."""
