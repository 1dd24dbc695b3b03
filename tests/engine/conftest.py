"""Every step of every engine here is followed by a check of its memory."""

import pytest

from jpaged.engine import Engine


@pytest.fixture(autouse=True)
def conserved(monkeypatch: pytest.MonkeyPatch):
    step = Engine.step

    def checked(self: Engine) -> list:
        changed = step(self)
        self.check()
        return changed

    monkeypatch.setattr(Engine, "step", checked)
