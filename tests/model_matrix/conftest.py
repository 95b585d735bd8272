"""The fixture `edited`: a family file with one mistake."""

from pathlib import Path

import pytest

from model_matrix import families


@pytest.fixture
def edited(tmp_path: Path):
    """edited(old, new): path of a copy of llama.toml with one of its texts replaced."""

    def edit(old: str, new: str) -> Path:
        text = (families.FOLDER / "llama.toml").read_text()
        assert old in text
        (tmp_path / "llama.toml").write_text(text.replace(old, new))
        return tmp_path / "llama.toml"

    return edit
