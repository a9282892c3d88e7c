"""Kernels for the CPU, written in Python and compiled by Numba (an optional dependency: nothing else imports it)."""
