"""The kernels of processors: C++ that is compiled for the machine at hand when an engine starts."""
