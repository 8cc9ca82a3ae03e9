"""The same bits as `DynamicCache` when every copy comes as late as it may."""

from tests.test_parity import *  # noqa: F403
