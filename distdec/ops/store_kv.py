"""Store a step's new keys and values into the pool of this rank."""

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, slot_mapping: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Write token t's key and value to slot `slot_mapping[t]`; -1 marks tokens that another rank holds.

    Equals `k_pool[slot_mapping[t]] = k[t]; v_pool[slot_mapping[t]] = v[t]` for every t with `slot_mapping[t] >= 0`.

    Shapes:
        k: [T, Hkv, D], v: [T, Hkv, Dv], the model's dtype, any strides with a dense last dimension
        slot_mapping: [T] int64, no slot twice
        k_pool: [S, Hkv, D], v_pool: [S, Hkv, Dv], the pool's dtype

    Raises:
        ValueError: shapes that do not match.

    Notes:
        In-place: writes the pools. Graph-safe and without host sync in the Triton twin; here the mask is read.
    """
    check_store(k, v, slot_mapping, k_pool, v_pool)
    mine = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[mine]
    k_pool.index_copy_(0, slots, k[mine].to(k_pool.dtype))
    v_pool.index_copy_(0, slots, v[mine].to(v_pool.dtype))


def check_store(k: Tensor, v: Tensor, slot_mapping: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Raise ValueError where the tensors of `store_kv` do not fit each other."""
    for name, new, pool in (("k", k, k_pool), ("v", v, v_pool)):
        if new.dim() != 3 or pool.dim() != 3 or new.shape[1:] != pool.shape[1:]:
            raise ValueError(f"{name} {list(new.shape)} does not fit a pool of {list(pool.shape)}")
    if slot_mapping.shape != k.shape[:1] or v.shape[0] != k.shape[0]:
        raise ValueError(
            f"expected one slot a token, got k {list(k.shape)}, v {list(v.shape)} and {list(slot_mapping.shape)} slots"
        )
