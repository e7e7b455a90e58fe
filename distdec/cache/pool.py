"""The device memory behind the slots: keys and values of one rank, all layers."""

import torch


class KVPool:
    """Hold one rank's keys and values.

    A slot that no view covers holds anything: what was there before, or whatever the memory held. Readers mask by the
    lengths of the views. Slot arithmetic in front of a stride is int64.

    Args:
        num_layers: layers of the model.
        num_slots: token slots, `CacheLayout.num_slots(kvp_rank)`.
        num_kv_heads: KV heads on this rank, after tensor parallelism.
        head_dim: of the keys, and of the values unless `v_head_dim` is given.
        dtype: of the stored keys and values.
        device: where the pool lives.
        v_head_dim: where values are narrower or wider than keys.
        poison: fill with NaN, so that a reader which strays into an unused slot shows it (tests).

    Shapes:
        k: [L, num_slots, Hkv, D]; v: [L, num_slots, Hkv, Dv].
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        v_head_dim: int | None = None,
        poison: bool = False,
    ) -> None:
        """Allocate; nothing is initialised unless poisoned.

        Raises:
            ValueError: a dtype that is no floating one of 16 bits or more.
        """
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(f"keys and values are stored in float32, bfloat16 or float16, got {dtype}")
        self.num_kv_heads, self.head_dim, self.v_head_dim = num_kv_heads, head_dim, v_head_dim or head_dim
        self.k = torch.empty(num_layers, num_slots, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(num_layers, num_slots, num_kv_heads, self.v_head_dim, dtype=dtype, device=device)
        if poison:
            self.k.fill_(float("nan"))
            self.v.fill_(float("nan"))
        # made once: an eager step asks for a layer's views in each layer
        self._layers = list(zip(self.k.unbind(), self.v.unbind(), strict=True))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of one layer, views of the pool."""
        if not 0 <= index < self.k.shape[0]:
            raise IndexError(f"layer must be 0 to {self.k.shape[0] - 1}, got {index}")
        return self._layers[index]

    @property
    def bytes(self) -> int:
        """Bytes of device memory held."""
        return self.k.nbytes + self.v.nbytes
