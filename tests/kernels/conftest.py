"""What the tests of kernels share: each instruction set that this machine runs, forced in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexdecode.kernels import ops


@pytest.fixture(params=ops.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = ops.use_isa()
    assert ops.use_isa(request.param) == request.param
    yield request.param
    ops.use_isa(before)
