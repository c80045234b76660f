"""Ahead-of-time builds: from a model's config, or from what a real run recorded, to the kernels that a service loads."""
