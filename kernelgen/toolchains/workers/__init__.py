"""Scripts that compile in processes of their own. None is imported by kernelgen: importing one would run it."""
