"""Ways of decoding when every copy comes as late as it may."""

from tests.test_decoding import (  # noqa: F401
    test_a_left_padded_batch_goes_on_with_a_longer_mask,
    test_assisted,
    test_modes,
    test_one_prefix_and_several_suffixes,
    test_several_turns_on_one_cache,
)
from tests.test_model_kinds import test_encoder_decoder  # noqa: F401
from tests.test_modes import test_modes_mix  # noqa: F401
