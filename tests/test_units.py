"""Sizes and rates as people write them."""

import pytest

from nvme_cache.errors import ConfigurationError
from nvme_cache.units import in_bytes, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("7", 7), ("8GiB", 8 << 30), ("500MB", 5 * 10**8), ("2TB", 2 * 10**12), ("3TiB", 3 << 40)],
)
def test_sizes(text, nbytes):
    assert parse_size("disk_budget", text) == nbytes


@pytest.mark.parametrize("text", ["", "8Gb", "8TB/s", "-1", "TB", "nanGB", True, 1.5, -1, None])
def test_what_is_no_size_is_named(text):
    with pytest.raises(ConfigurationError, match="disk_budget="):
        parse_size("disk_budget", text)


def test_rates():
    assert parse_rate("nvme", "7GB/s") == 7 * 10**9
    assert parse_rate("nvme", "1TB/s") == 10**12


@pytest.mark.parametrize("text", ["7gb/s", "7Gb/s", "0GB/s", "fast"])
def test_what_is_no_rate_is_named(text):
    with pytest.raises(ConfigurationError, match="nvme="):
        parse_rate("nvme", text)


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1.5e6, "1.5 MB"), (17.18e9, "17.2 GB")])
def test_bytes_for_people(nbytes, text):
    assert in_bytes(nbytes) == text
