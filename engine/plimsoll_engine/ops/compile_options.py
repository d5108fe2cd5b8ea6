"""Compiler options that all kernels share."""

from __future__ import annotations

# Multiply and add in one instruction. Said outright: Triton's default is about to change.
COMPILE_OPTIONS = {"enable_fp_fusion": True}
