"""Files of tokens as Megatron and nanoGPT write them."""

import struct

import fxtrain as fx


def write_megatron(folder, documents, sequences=None, name="a"):
    """Files with one sequence for each document, or with given sizes of sequences in each."""
    flat = [token for document in documents for token in document]
    sequences = sequences or [[len(document)] for document in documents]
    sizes = [size for inside in sequences for size in inside]
    (folder / f"{name}.bin").write_bytes(struct.pack(f"<{len(flat)}H", *flat))
    n, starts = len(sizes), [2 * sum(sizes[:i]) for i in range(len(sizes))]
    bounds = [sum(len(s) for s in sequences[:i]) for i in range(len(documents) + 1)]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, n, len(bounds))
    index = struct.pack(f"<{n}i{n}q{len(bounds)}q", *sizes, *starts, *bounds)
    (folder / f"{name}.idx").write_bytes(head + index)
    return fx.data.MegatronTokens(path=str(folder / name))


def write_nanogpt(folder, documents, name="a"):
    flat = [token for document in documents for token in (*document, 0)]
    (folder / name).write_bytes(struct.pack(f"<{len(flat)}H", *flat))
    return fx.data.NanoGPTTokens(path=str(folder / name), end=0)
