"""Which (kvp, tp) are legal, and how they lie over hosts: integers only, without torch or process groups."""

from collections.abc import Sequence


def legal_layouts(
    num_ranks: int, num_q_heads: int | None = None, num_kv_heads: int | None = None
) -> list[tuple[int, int]]:
    """List every legal (kvp, tp) of a number of ranks: KV heads go to the tp axis in whole groups, kvp is free.

    Without head counts, every split of the ranks.

    Example: 8 ranks, 32 query heads, 2 KV heads -> [(8, 1), (4, 2)].
    """
    splits = [(num_ranks // tp, tp) for tp in range(1, num_ranks + 1) if num_ranks % tp == 0]
    if num_q_heads is None or num_kv_heads is None:
        return splits
    if min(num_q_heads, num_kv_heads) < 1 or num_q_heads % num_kv_heads:
        return []
    return [(kvp, tp) for kvp, tp in splits if num_kv_heads % tp == 0]


def validate_layout(
    num_ranks: int, kvp: int, tp: int, num_q_heads: int | None = None, num_kv_heads: int | None = None
) -> None:
    """Check a layout, against a model where its head counts are known: the only such check, free of process groups.

    More ranks than KV heads is the normal case: the surplus goes to the kvp axis.

    Args:
        num_ranks: ranks of the mesh (the world, or the subset of it that the mesh spans).
        kvp: ranks along which one sequence's tokens are sharded.
        tp: ranks along which heads are sharded.
        num_q_heads: query heads of the model, before sharding.
        num_kv_heads: KV heads of the model, before sharding.

    Raises:
        ValueError: the layout is illegal; the message has every number and the legal layouts.
    """
    numbers = {"ranks": num_ranks, "kvp": kvp, "tp": tp}
    if num_q_heads is not None and num_kv_heads is not None:
        numbers |= {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}
    fault = None
    if min(numbers.values()) < 1:
        fault = "every number must be at least 1"
    elif num_q_heads is not None and num_kv_heads is not None and num_q_heads % num_kv_heads:
        fault = f"the query heads do not form whole groups: {num_q_heads} is not a multiple of {num_kv_heads}"
    elif kvp * tp != num_ranks:
        fault = f"kvp x tp = {kvp} x {tp} = {kvp * tp} is not the number of ranks, {num_ranks}"
    elif num_kv_heads is not None and num_kv_heads % tp:
        fault = f"tp = {tp} does not divide the {num_kv_heads} KV heads; give the surplus ranks to kvp"
    if fault is None:
        return
    legal = ", ".join(str(pair) for pair in legal_layouts(num_ranks, num_q_heads, num_kv_heads)) or "none"
    told = ", ".join(f"{name}={value}" for name, value in numbers.items())
    raise ValueError(f"illegal layout: {fault} ({told}); legal (kvp, tp): {legal}")


def check_degrees(members: Sequence[int], world_size: int, kvp: int | None, tp: int) -> int:
    """Check the ranks and degrees of a mesh; return kvp, which None leaves to be what tp allows.

    Raises:
        ValueError: with all numbers.
    """
    num_ranks = len(members)
    if list(members) != sorted(set(members)) or not members or members[0] < 0 or members[-1] >= world_size:
        raise ValueError(f"ranks must be ascending world ranks from 0 to {world_size - 1}, got {list(members)}")
    chosen = max(1, num_ranks // max(1, tp)) if kvp is None else kvp
    validate_layout(num_ranks, chosen, tp)
    return chosen


def across_hosts(members: Sequence[int], kvp: int, ranks_per_host: int) -> list[list[int]]:
    """List the kvp groups whose ranks are not all on one host; torchrun numbers the ranks host by host.

    Example: 8 ranks, 4 a host: kvp 4 -> [], kvp 8 -> [[0, 1, 2, 3, 4, 5, 6, 7]].
    """
    groups = [list(members[start : start + kvp]) for start in range(0, len(members), kvp)]
    return [group for group in groups if group[0] // ranks_per_host != group[-1] // ranks_per_host]
