"""Every way of decoding when every copy comes as late as it may."""

from tests.test_decoding import *  # noqa: F403
from tests.test_model_kinds import *  # noqa: F403
from tests.test_modes import *  # noqa: F403
from tests.test_operations import *  # noqa: F403
