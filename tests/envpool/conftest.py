import pytest

pytest.importorskip("envpool")
