"""Launchers of the Triton kernels: checks, grid and launch. Same signatures as ``reference``."""
