"""Safetensors as this project writes and reads them: the layout, tensors as its pieces, and objects in a store.

    8 bytes     length N of the header, little-endian
    N bytes     JSON: "__metadata__" (text → text), and for every tensor its dtype, shape and data_offsets;
                padded with blanks
    the rest    the tensors, little-endian, one after another without holes

Checkpoints of others, which may hold more kinds of tensors than ours, are read by `hub`.
"""
