"""One module per generated kernel, named as its template: kernels/attention/prefill_mma.py is the host side of
templates/attention/prefill_mma.cu.jinja and of templates/include/kernelgen/attention/prefill_mma.cuh."""
