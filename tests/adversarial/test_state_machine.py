"""The state machine, with the moment of every copy drawn at random."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.test_state_machine import CHECKS, CacheMachine

from .executor import Executor, early, late


@pytest.fixture
def adversary():
    """None for all: every example has its own."""


class AdversarialMachine(CacheMachine):
    """As its base, with copies that come when they like."""

    def __init__(self):
        super().__init__()
        self.adversary = Executor(late)
        self.adversary.__enter__()

    @initialize(seed=st.integers(0, 1 << 32))
    def seed(self, seed):
        self.random = random.Random(seed)

    @rule(progress=st.sampled_from(["late", "early", "random"]))
    def change_progress(self, progress):
        draw = self.random.randint
        self.adversary.progress = {"late": late, "early": early, "random": lambda queued: draw(0, queued)}[progress]

    @rule()
    def change_stream(self):
        with self.adversary.stream_of_the_user():
            for layer_idx in range(self.layers):
                states = self.states(1)
                ours = self.ours.update(*states, layer_idx)
                stock = self.stock.update(*(part.clone() for part in states), layer_idx)
                assert all(part.equal(expected) for part, expected in zip(ours, stock, strict=True))

    def teardown(self):
        try:
            super().teardown()
        finally:
            self.adversary.__exit__(None, None, None)


TestStateMachine = AdversarialMachine.TestCase
TestStateMachine.settings = settings(
    max_examples=200, stateful_step_count=15, deadline=None, suppress_health_check=CHECKS
)


@pytest.mark.slow
class TestStateMachineLong(AdversarialMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=30, deadline=None, suppress_health_check=CHECKS)
