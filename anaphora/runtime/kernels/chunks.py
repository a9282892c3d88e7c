"""Who reads which chunk of keys: found in compiled code, as it is asked at every step.

Knows sequences, block tables and what each token sees; knows nothing of heads and threads. See runtime.chunks.
"""

from __future__ import annotations

import numpy as np

from anaphora.runtime.kernels.compiling import kernel

# Columns of the table of chunks while readers are found: the first position that anyone sees, the one behind the last,
# the row of the table that holds their blocks, how many read it, and the next chunk at the same place.
LEFT, RIGHT, ROW, READERS, NEXT = range(5)


@kernel
def same_blocks(table, row, other, first, last):
    """Whether two rows hold the same blocks in columns [first, last]; where they end they differ soonest."""
    column = last
    while column >= first and table[row, column] == table[other, column]:
        column -= 1
    return column < first


@kernel
def find_chunk(chunks, heads, tails, count, number, left, right, table, row, block_size):
    """The chunk at place `number` that holds the keys [left, right) of a table's row; `count`, a new one, if none does.

    One takes them in if they are the last ones of its own, or its own are the last ones of them.
    """
    line = heads[number]
    while line >= 0:
        known = chunks[line]
        first = max(left, known[LEFT]) // block_size
        # Chunks with different ends differ, even where one is the beginning of the other.
        if known[RIGHT] == right and same_blocks(table, row, known[ROW], first, (right - 1) // block_size):
            if left < known[LEFT]:
                known[LEFT], known[ROW] = left, row
            return line
        line = known[NEXT]
    chunks[count, LEFT], chunks[count, RIGHT], chunks[count, ROW] = left, right, row
    chunks[count, READERS], chunks[count, NEXT] = 0, -1
    if heads[number] < 0:
        heads[number] = count
    else:
        chunks[tails[number], NEXT] = count
    tails[number] = count
    return count


@kernel
def fill_slots(slots, begin, left, right, row, block_size):
    """Where each key of a chunk from position `begin` on lies; before `left` and from `right` on, the nearest one's."""
    for place in range(len(slots)):
        position = min(max(begin + place, left), right - 1)
        slots[place] = row[position // block_size] * block_size + position % block_size


@kernel
def cut(sequences, tables, seen, block_size, chunk_tokens, key_cost):
    """sequences: int64 [sequences, 3], each one's first token in the packed batch, first position, number of tokens.
    tables: int32 [groups, sequences, blocks]. seen: int64 [groups, tokens], the first position that each token sees.
    key_cost: what it costs to bring a key, in queries that read it.

    Returns the arrays of runtime.chunks.Chunks: groups, slots, items, readers, token_partials, work.
    """
    num_groups, num_tokens = seen.shape
    most, longest = 0, 0
    for first, start, length in sequences:
        numbers = (start + length - 1) // chunk_tokens + 1
        longest = max(longest, numbers)
        for group in range(num_groups):
            most += numbers - seen[group, first] // chunk_tokens
    chunks = np.empty((most, 5), np.int64)
    begins = np.empty(most, np.int64)  # of each chunk, the position where it would begin, if all of it were seen
    chunk_of = np.empty(most, np.int64)  # of each sequence at each place, group after group
    groups = np.zeros(num_groups + 1, np.int64)
    token_partials = np.zeros((num_groups, num_tokens + 1), np.int64)
    tails = np.empty(longest, np.int64)
    count, visit = 0, 0
    for group in range(num_groups):
        heads = np.full(longest, -1, np.int64)
        for row, (first, start, length) in enumerate(sequences):
            for token in range(first, first + length):
                here = (start + token - first) // chunk_tokens + 1 - seen[group, token] // chunk_tokens
                token_partials[group, token + 1] = token_partials[group, token] + here
            begin, end = seen[group, first], start + length
            for number in range(begin // chunk_tokens, (end - 1) // chunk_tokens + 1):
                left, right = max(begin, number * chunk_tokens), min(end, (number + 1) * chunk_tokens)
                line = find_chunk(chunks, heads, tails, count, number, left, right, tables[group], row, block_size)
                if line == count:
                    begins[count] = number * chunk_tokens
                    count += 1
                chunk_of[visit] = line
                visit += 1
                for token in range(first + max(0, left - start), first + length):
                    if seen[group, token] >= right:  # its window has passed, and that of those behind it
                        break
                    chunks[line, READERS] += 1
        groups[group + 1] = count

    slots = np.empty((count, chunk_tokens), np.int64)
    items = np.zeros((count, 2), np.int64)
    work = np.zeros(count + 1, np.int64)
    total = 0
    for group in range(num_groups):
        for line in range(groups[group], groups[group + 1]):
            left, right, num_readers = chunks[line, LEFT], chunks[line, RIGHT], chunks[line, READERS]
            fill_slots(slots[line], begins[line], left, right, tables[group, chunks[line, ROW]], block_size)
            items[line] = total
            total += num_readers
            work[line + 1] = work[line] + (right - left) * (key_cost + num_readers)
    readers = np.empty((4, total), np.int64)
    visit = 0
    for group in range(num_groups):
        for first, start, length in sequences:
            begin, end = seen[group, first], start + length
            for number in range(begin // chunk_tokens, (end - 1) // chunk_tokens + 1):
                left, right = max(begin, number * chunk_tokens), min(end, (number + 1) * chunk_tokens)
                line = chunk_of[visit]
                visit += 1
                for token in range(first + max(0, left - start), first + length):
                    if seen[group, token] >= right:
                        break
                    place = items[line, 1]
                    readers[0, place] = token
                    readers[1, place] = max(seen[group, token], left) - begins[line]
                    readers[2, place] = min(start + token - first + 1, right) - begins[line]
                    readers[3, place] = token_partials[group, token] + number - seen[group, token] // chunk_tokens
                    items[line, 1] += 1
    return groups, slots, items, readers, token_partials, work
