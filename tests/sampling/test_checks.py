"""The checks that are shared with the mutants, on the sampler itself."""

from collections.abc import Callable

import pytest

from jpaged import sampling
from tests.sampling import checks


@pytest.mark.parametrize("check", checks.ALL, ids=lambda check: check.__name__)
def test_check(check: Callable):
    check(sampling)
