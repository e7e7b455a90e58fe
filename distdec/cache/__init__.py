"""The integer side of the KV cache (chunks, views, placement) and the device pool it describes."""
