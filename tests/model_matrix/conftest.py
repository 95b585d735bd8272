"""The fixture `edited`: a family file with one mistake."""

from pathlib import Path

import pytest

from model_matrix import families


@pytest.fixture
def edited(tmp_path: Path):
    """edited(old, new, family): path of a copy of a family file with one of its texts replaced."""

    def edit(old: str, new: str, family: str = "llama") -> Path:
        text = (families.FOLDER / f"{family}.toml").read_text()
        assert old in text
        (tmp_path / f"{family}.toml").write_text(text.replace(old, new))
        return tmp_path / f"{family}.toml"

    return edit
