"""distdec: decoding with a KV cache that is sharded along the sequence over the GPUs of one or more hosts."""

__version__ = "0.1.0"
