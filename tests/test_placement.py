"""The static plan: equal shares, budgets held to the byte, everything placed."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nvme_cache.placement import Budgets, Tier, place

sizes = st.integers(0, 200)


def test_fastest_tier_first_and_equal_shares():
    budgets = Budgets(device_bytes=4 * 20, host_bytes=4 * 35)  # shares of 20 and 35 bytes for each of 4 layers
    assert place(10, 10, budgets, 4, Counter(), Counter()) == {Tier.DEVICE: 2, Tier.HOST: 3, Tier.NVME: 5}


def test_a_full_share_goes_on_to_the_next_tier():
    budgets = Budgets(device_bytes=80, host_bytes=80)
    used = Counter({Tier.DEVICE: 20})
    assert place(3, 10, budgets, 4, used, used) == {Tier.DEVICE: 0, Tier.HOST: 2, Tier.NVME: 1}


@given(sizes, sizes, st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=20))
def test_budgets_hold_over_any_sequence_of_seals(device, host, num_layers, seals):
    """Also when there turn out to be more layers than the plan assumed."""
    budgets = Budgets(device, host)
    used = [Counter() for _ in range(6)]
    total = Counter()
    for layer, num_blocks in seals:
        placed = place(num_blocks, 7, budgets, num_layers, used[layer], total)
        assert sum(placed.values()) == num_blocks
        for tier, count in placed.items():
            used[layer][tier] += 7 * count
            total[tier] += 7 * count
        assert total[Tier.DEVICE] <= device
        assert total[Tier.HOST] <= host
        assert used[layer][Tier.DEVICE] <= device // num_layers
        assert used[layer][Tier.HOST] <= host // num_layers
