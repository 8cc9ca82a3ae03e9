"""The list in mutants.py takes out every synchronisation there is; whether each is missed, `make mutants` shows."""

import pytest

from .mutants import MUTANTS, ROOT, uncovered


@pytest.fixture
def adversary():
    """None: nothing is copied here."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.hazard)
def test_each_mutant_is_found_once(mutant):
    assert (ROOT / "nvme_cache" / f"{mutant.module}.py").read_text().count(mutant.line) == 1


def test_no_synchronisation_is_without_a_mutant():
    assert uncovered() == []
