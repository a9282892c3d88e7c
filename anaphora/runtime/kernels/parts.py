"""What a decoder does between its matrix products, row by row. Knows addresses and elements; sums are float32."""

from __future__ import annotations

import math

import numpy as np

from anaphora.runtime.kernels.compiling import kernel
from anaphora.runtime.kernels.vectors import load_element, store_element


@kernel
def normalise(source, weight, eps, offset, size, out, element):
    """RMS norm of `size` elements, by weight + offset."""
    total = np.float32(0)
    for i in range(size):
        value = load_element(source, i, element)
        total += value * value
    factor = np.float32(1) / np.float32(math.sqrt(total / np.float32(size) + eps))
    for i in range(size):
        scaled = load_element(source, i, element) * factor
        store_element(out, i, scaled * (load_element(weight, i, element) + offset), element)


@kernel
def finish_head(line, bias, norm, eps, offset, cos, sin, dim, element):
    """One head of float32 in place: add a bias, normalise, turn; each part that has an address.

    line: float32 array [dim]. cos, sin: float32 arrays [dim], the sine's first half negated; or empty.
    """
    if bias != 0:
        for i in range(dim):
            line[i] += load_element(bias, i, element)
    if norm != 0:
        total = np.float32(0)
        for i in range(dim):
            total += line[i] * line[i]
        factor = np.float32(1) / np.float32(math.sqrt(total / np.float32(dim) + eps))
        for i in range(dim):
            line[i] *= factor * (load_element(norm, i, element) + offset)
    if len(cos) > 0:
        half = dim // 2
        for i in range(half):
            low, high = line[i], line[i + half]
            line[i] = low * cos[i] + high * sin[i]
            line[i + half] = high * cos[i + half] + low * sin[i + half]


@kernel
def store_line(line, out, element):
    """A float32 array as elements."""
    for i in range(len(line)):
        store_element(out, i, line[i], element)


@kernel
def add_bias(line, bias, begin, end, element):
    """line[begin:end] += bias[begin:end], if there is one; line: float32 array."""
    if bias != 0:
        for n in range(begin, end):
            line[n] += load_element(bias, n, element)


@kernel
def add_to_hidden(hidden, line, bias, begin, end, element):
    """hidden[begin:end] += line[begin:end] + bias[begin:end]; hidden: address of elements."""
    add_bias(line, bias, begin, end, element)
    for n in range(begin, end):
        store_element(hidden, n, load_element(hidden, n, element) + line[n], element)


@kernel
def add_normalised(hidden, line, norm, eps, offset, begin, end, element):
    """hidden[begin:end] += RMS norm of a line, which is read as a whole; line: float32 array, hidden: of elements."""
    total = np.float32(0)
    for n in range(len(line)):
        total += line[n] * line[n]
    factor = np.float32(1) / np.float32(math.sqrt(total / np.float32(len(line)) + eps))
    for n in range(begin, end):
        added = line[n] * factor * (load_element(norm, n, element) + offset)
        store_element(hidden, n, load_element(hidden, n, element) + added, element)


@kernel
def copy_elements(source, out, count, element):
    for i in range(count):
        store_element(out, i, load_element(source, i, element), element)
