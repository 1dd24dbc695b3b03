"""What tests of several folders are skipped for, each with its reason."""

import pytest

from pallas_kernels.gpu import mosaic

# By the version of jax alone, so that a jax which should have Mosaic GPU and has it not is a failure.
needs_mosaic = pytest.mark.skipif(mosaic.lacks() is not None, reason=str(mosaic.lacks()))
