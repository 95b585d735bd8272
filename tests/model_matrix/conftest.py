"""A family file to spoil, for the tests of this folder."""

from pathlib import Path

import pytest

from model_matrix import families


@pytest.fixture
def spoilt(tmp_path: Path):
    """spoilt(old, new): path of a copy of llama.toml with one text replaced, which must be there."""

    def spoil(old: str, new: str) -> Path:
        text = (families.FOLDER / "llama.toml").read_text()
        assert old in text
        (tmp_path / "llama.toml").write_text(text.replace(old, new))
        return tmp_path / "llama.toml"

    return spoil
