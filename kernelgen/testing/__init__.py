"""For tests of kernels: inputs that provoke faults, and comparisons with a derived tolerance."""
